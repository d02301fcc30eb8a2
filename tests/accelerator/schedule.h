// What a device does when: streams, marks and the thread that runs what was queued.
//
// The host queues steps on streams. One thread runs them, in the order of their stream, and after
// the marks that their stream was told to wait for. Nothing else is promised, and the schedule says
// how the freedom is used:
//
//   late         a step runs when the host waits for something that needs it, and not before;
//   eager        a step runs as soon as it may;
//   random:SEED  after each new step a few steps run, of streams drawn by chance.
//
// With `patience` milliseconds given, a device that nobody waits for runs a step that often all the
// same: ranks that wait for each other need it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace late {

using Clock = std::chrono::steady_clock;
using StreamKey = int64_t;  // device << 32 | stream

// A place in a stream. Reached when all that was queued before it has run.
struct Mark {
  StreamKey stream;
  bool reached = false;
  Clock::time_point when{};
};
using MarkRef = std::shared_ptr<Mark>;

class Schedule {
 public:
  enum class Kind { LATE, EAGER, RANDOM };

  static Schedule& get() {
    static auto* schedule = new Schedule();  // outlives every stream and every tensor
    return *schedule;
  }

  void choose(Kind kind, uint64_t seed, int64_t patience) {
    std::lock_guard<std::mutex> lock(mutex_);
    kind_ = kind;
    random_.seed(seed);
    patience_ = std::chrono::milliseconds(patience);
    wake_.notify_all();
  }

  void queue(StreamKey stream, std::function<void()> run) {
    push(stream, {std::move(run), nullptr, nullptr});
  }

  MarkRef record(StreamKey stream) {
    auto mark = std::make_shared<Mark>();
    mark->stream = stream;
    push(stream, {nullptr, nullptr, mark});
    return mark;
  }

  void wait(StreamKey stream, MarkRef mark) { push(stream, {nullptr, std::move(mark), nullptr}); }

  // Asking lets the device go one step on, or a host that polls would ask for ever.
  bool query(const MarkRef& mark) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!mark->reached) {
      asked_.push_back(mark);
      wake_.notify_all();
      done_.wait(lock, [&] { return asked_.empty(); });
    }
    return mark->reached;
  }

  void synchronize(const MarkRef& mark) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto goal = goals_.insert(goals_.end(), mark);
    wake_.notify_all();
    done_.wait(lock, [&] { return mark->reached; });
    goals_.erase(goal);
    raise(lock);
  }

  void synchronize(StreamKey stream) { synchronize(record(stream)); }

  void synchronize_device(int64_t device) {
    for (auto stream : streams(device)) synchronize(stream);
  }

  // Whether work of `stream` is left; one step of it is run if so.
  bool idle(StreamKey stream) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (queues_[stream].empty() && running_ != stream) return true;
    }
    return query(record(stream));
  }

  bool reached(const MarkRef& mark) {
    std::lock_guard<std::mutex> lock(mutex_);
    return mark->reached;
  }

  int64_t steps() {
    std::lock_guard<std::mutex> lock(mutex_);
    return steps_;
  }

  int64_t waiting() {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t left = 0;
    for (auto& [_, steps] : queues_)
      for (auto& step : steps) left += step.run ? 1 : 0;
    return left;
  }

 private:
  struct Step {
    std::function<void()> run;
    MarkRef waits, reaches;
  };

  Schedule() : thread_([this] { work(); }) { thread_.detach(); }

  std::vector<StreamKey> streams(int64_t device) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<StreamKey> found;
    for (auto& [stream, _] : queues_)
      if (stream >> 32 == device) found.push_back(stream);
    return found;
  }

  void push(StreamKey stream, Step step) {
    std::unique_lock<std::mutex> lock(mutex_);
    queues_[stream].push_back(std::move(step));
    if (kind_ == Kind::RANDOM && random_() % 2) free_steps_ += random_() % 6;
    wake_.notify_all();
  }

  // An error of a step is the host's when it waits next, as with a real device.
  void raise(std::unique_lock<std::mutex>&) {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  // The stream whose next step brings `mark` nearer: its own, or one that it waits for.
  StreamKey towards(const MarkRef& mark) {
    auto stream = mark->stream;
    for (;;) {
      auto& next = queues_[stream].front();
      if (!next.waits || next.waits->reached) return stream;
      stream = next.waits->stream;
    }
  }

  bool any_runnable(StreamKey& stream) {
    std::vector<StreamKey> able;
    for (auto& [key, steps] : queues_)
      if (!steps.empty() && (!steps.front().waits || steps.front().waits->reached))
        able.push_back(key);
    if (able.empty()) return false;
    stream = able[random_() % able.size()];
    return true;
  }

  bool choose_stream(StreamKey& stream) {
    bool detour = kind_ == Kind::RANDOM && random_() % 3 == 0 && any_runnable(stream);
    if (detour) return true;
    for (auto* marks : {&asked_, &goals_})
      for (auto& mark : *marks)
        if (!mark->reached) {
          stream = towards(mark);
          return true;
        }
    if (kind_ == Kind::EAGER) return any_runnable(stream);
    if (free_steps_ > 0) {
      --free_steps_;
      return any_runnable(stream);
    }
    return false;
  }

  void work() {
    prepare_thread();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      StreamKey stream = 0;
      if (!choose_stream(stream)) {
        if (!asked_.empty()) {
          asked_.clear();
          done_.notify_all();
        }
        if (patience_.count() == 0) {
          wake_.wait(lock);
          continue;
        }
        if (wake_.wait_for(lock, patience_) == std::cv_status::no_timeout || !any_runnable(stream))
          continue;
      }
      auto& steps = queues_[stream];
      auto step = std::move(steps.front());
      steps.pop_front();
      if (step.run) {
        ++steps_;
        running_ = stream;
        lock.unlock();
        std::exception_ptr error;
        try {
          step.run();
        } catch (...) {
          error = std::current_exception();
        }
        step.run = nullptr;  // what it holds goes without the lock
        lock.lock();
        running_ = -1;
        if (error && !error_) error_ = error;
      }
      if (step.reaches) {
        step.reaches->reached = true;
        step.reaches->when = Clock::now();
      }
      asked_.clear();
      done_.notify_all();
    }
  }

  static void prepare_thread();  // what PyTorch needs to run operators here

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::map<StreamKey, std::deque<Step>> queues_;
  std::list<MarkRef> goals_, asked_;
  std::exception_ptr error_;
  std::mt19937_64 random_;
  Kind kind_ = Kind::LATE;
  std::chrono::milliseconds patience_{0};
  int64_t free_steps_ = 0, steps_ = 0;
  StreamKey running_ = -1;
  std::thread thread_;
};

}  // namespace late
