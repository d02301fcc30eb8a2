// The memory of the device, and page-locked memory of the host.
//
// Both are ordinary memory. A block that is freed is filled with POISON and given to the next who
// asks for that size, so whoever still reads or writes it is seen. As with the caching allocator of
// CUDA, a block belongs to the stream it was allocated on: it is free for that stream at once, in
// the order of the stream, and work of another stream is waited for only where `record_stream` said
// so. A block of locked memory is kept until the copies that PyTorch queued on it have run.
#pragma once

#include <cstdlib>
#include <cstring>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "schedule.h"

namespace late {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int POISON = 0xFF;  // a NaN in every floating dtype, and no index
constexpr size_t GRAIN = 512;  // bytes; what the allocator of CUDA rounds to as well

inline StreamKey key(const c10::Stream& stream) {
  return (static_cast<int64_t>(stream.device_index()) << 32) | stream.id();
}
c10::Stream current_stream(c10::DeviceIndex device);  // of this thread
c10::DeviceIndex current_device();

inline size_t rounded(size_t nbytes) { return (nbytes + GRAIN - 1) / GRAIN * GRAIN; }

inline void* fresh(size_t nbytes) {
  void* address = std::aligned_alloc(GRAIN, nbytes);
  TORCH_CHECK(address, "the machine has no ", nbytes, " bytes left to stand for a device's");
  std::memset(address, POISON, nbytes);
  return address;
}

struct DeviceBlock {
  void* address;
  size_t nbytes;
  c10::Stream stream;
  std::vector<StreamKey> also;  // streams told by record_stream
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  size_t total = size_t{1} << 30;

  c10::DataPtr allocate(size_t nbytes) override {
    const auto device = c10::Device(TYPE, current_device());
    if (nbytes == 0) return {nullptr, nullptr, &release, device};
    auto* block = take(rounded(nbytes), current_stream(device.index()));
    return {block->address, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    Schedule::get().queue(key(current_stream(current_device())),
                          [=] { std::memcpy(to, from, nbytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex device = 0; device < 8; ++device)
      Schedule::get().synchronize_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    reclaim();
    for (auto& [_, blocks] : free_)
      for (auto* block : blocks) {
        reserved_ -= block->nbytes;
        std::free(block->address);
        delete block;
      }
    free_.clear();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto* block = static_cast<DeviceBlock*>(data.get_context());
    if (block && block->stream != stream) block->also.push_back(key(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = allocated_;
      (*bytes)[0].peak = peak_;
    }
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = reserved_;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = allocated_;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {total - std::min(total, reserved_), total};
  }

  static DeviceMemory& get() {
    static auto* memory = new DeviceMemory();
    return *memory;
  }

 private:
  DeviceBlock* take(size_t nbytes, c10::Stream stream) {
    for (bool emptied = false;; emptied = true) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        reclaim();
        auto& kept = free_[{key(stream), nbytes}];
        if (!kept.empty()) {
          auto* block = kept.back();
          kept.pop_back();
          return count(block);
        }
        if (reserved_ + nbytes <= total) {
          reserved_ += nbytes;
          return count(new DeviceBlock{fresh(nbytes), nbytes, stream, {}});
        }
        if (emptied)
          TORCH_CHECK_WITH(OutOfMemoryError, false, "late: out of memory: tried to allocate ",
                           nbytes, " bytes; of ", total, " are reserved ", reserved_);
      }
      emptyCache({0, 0});
    }
  }

  DeviceBlock* count(DeviceBlock* block) {
    allocated_ += block->nbytes;
    peak_ = std::max(peak_, allocated_);
    return block;
  }

  static void release(void* context) {
    auto* block = static_cast<DeviceBlock*>(context);
    if (!block) return;
    auto& memory = get();
    std::vector<MarkRef> marks;
    for (auto stream : block->also) marks.push_back(Schedule::get().record(stream));
    block->also.clear();
    std::lock_guard<std::mutex> lock(memory.mutex_);
    memory.allocated_ -= block->nbytes;
    memory.held_.push_back({block, std::move(marks)});
    memory.reclaim();
  }

  // Makes what no recorded stream uses any longer free for the stream that it belongs to.
  void reclaim() {
    for (auto held = held_.begin(); held != held_.end();) {
      bool busy = false;
      for (auto& mark : held->second) busy = busy || !Schedule::get().reached(mark);
      if (busy) {
        ++held;
        continue;
      }
      auto* block = held->first;
      auto stream = key(block->stream);
      Schedule::get().queue(stream, [address = block->address, nbytes = block->nbytes] {
        std::memset(address, POISON, nbytes);
      });
      free_[{stream, block->nbytes}].push_back(block);
      held = held_.erase(held);
    }
  }

  std::mutex mutex_;
  std::map<std::pair<StreamKey, size_t>, std::vector<DeviceBlock*>> free_;
  std::list<std::pair<DeviceBlock*, std::vector<MarkRef>>> held_;
  size_t allocated_ = 0, peak_ = 0, reserved_ = 0;
};

class LockedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    std::lock_guard<std::mutex> lock(mutex_);
    auto size = rounded(nbytes);
    for (auto kept = free_.rbegin(); kept != free_.rend(); ++kept)
      if (kept->second.nbytes == size && !busy(kept->second)) {
        auto* address = kept->first;
        auto range = std::move(kept->second);
        free_.erase(std::next(kept).base());
        range.copies.clear();
        ranges_[address] = std::move(range);
        return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
      }
    auto* address = static_cast<char*>(fresh(size));
    ranges_[address] = {size, {}};
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(address) != nullptr;
  }

  // A copy from or to `address` is queued, and has run when `mark` is reached.
  void used(const void* address, MarkRef mark) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto* range = find(address)) range->copies.push_back(std::move(mark));
  }

  // Pages that somebody else mapped, as with cudaHostRegister.
  void lock(uintptr_t address, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[reinterpret_cast<char*>(address)] = {nbytes, {}};
  }
  void unlock(uintptr_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = ranges_.find(reinterpret_cast<char*>(address));
    TORCH_CHECK(found != ranges_.end(), "late: these pages are not locked: ", address);
    bool used = busy(found->second);
    ranges_.erase(found);
    TORCH_CHECK(!used, "late: pages are unlocked while a copy from or to them is queued");
  }

  static LockedMemory& get() {
    static auto* memory = new LockedMemory();
    return *memory;
  }

 private:
  struct Range {
    size_t nbytes;
    std::vector<MarkRef> copies;
  };

  static bool busy(const Range& range) {
    for (auto& mark : range.copies)
      if (!Schedule::get().reached(mark)) return true;
    return false;
  }

  Range* find(const void* address) {
    auto after = ranges_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == ranges_.begin()) return nullptr;
    --after;
    return address < after->first + after->second.nbytes ? &after->second : nullptr;
  }

  static void release(void* context) {
    if (!context) return;
    auto& memory = get();
    auto* address = static_cast<char*>(context);
    std::lock_guard<std::mutex> lock(memory.mutex_);
    auto range = std::move(memory.ranges_.at(address));
    memory.ranges_.erase(address);
    if (!busy(range)) std::memset(address, POISON, range.nbytes);
    memory.free_.emplace_back(address, std::move(range));
  }

  std::mutex mutex_;
  std::map<char*, Range> ranges_;
  std::vector<std::pair<char*, Range>> free_;
};

}  // namespace late
