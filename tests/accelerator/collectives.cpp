// Collectives of the device, as NCCL has them: on a stream of their own, which waits for the
// caller's; who waits for the work makes the current stream wait, and not the host. Gloo carries the
// bytes when the stream gets there, so a rank that is late holds the others up.
#include <ATen/core/TensorBody.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "device.h"

namespace late {

namespace {

struct LateWork final : c10d::Work {
  explicit LateWork(MarkRef mark) : mark(std::move(mark)) {}
  MarkRef mark;
  bool isCompleted() override { return Schedule::get().query(mark); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    Schedule::get().wait(key(current_stream(current_device())), mark);
  }
};

struct Collectives final : c10d::Backend {
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> carrier)
      : Backend(carrier->getRank(), carrier->getSize()),
        carrier(std::move(carrier)),
        stream(c10::impl::getDeviceGuardImpl(TYPE)->getNewStream(
            c10::Device(TYPE, current_device()))) {}
  c10::intrusive_ptr<c10d::Backend> carrier;
  c10::Stream stream;

  const std::string getBackendName() const override { return "late"; }

  template <class F>
  c10::intrusive_ptr<c10d::Work> issue(const std::vector<at::Tensor>& tensors, F call) {
    auto& schedule = Schedule::get();
    auto here = key(current_stream(current_device()));
    schedule.wait(key(stream), schedule.record(here));
    std::vector<at::Tensor> over;
    for (const auto& tensor : tensors) {
      auto* at = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
      over.push_back(at::from_blob(at + (at ? tensor.storage_offset() * tensor.itemsize() : 0),
                                   tensor.sizes(), tensor.strides(), [](void*) {},
                                   at::TensorOptions().dtype(tensor.dtype())));
      DeviceMemory::get().recordStream(tensor.storage().data_ptr(), stream);
    }
    schedule.queue(key(stream), [over, call, to = carrier]() mutable { call(*to, over)->wait(); });
    return c10::make_intrusive<LateWork>(schedule.record(key(stream)));
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return issue(tensors, [options](auto& to, auto& over) { return to.broadcast(over, options); });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return issue(tensors, [options](auto& to, auto& over) { return to.allreduce(over, options); });
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options) override {
    return issue(tensors, [options](auto& to, auto& over) { return to.reduce(over, options); });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& all, at::Tensor& own,
                                                 const c10d::AllgatherOptions& options) override {
    return issue({all, own}, [options](auto& to, auto& over) {
      return to._allgather_base(over[0], over[1], options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& own, at::Tensor& all, const c10d::ReduceScatterOptions& options) override {
    return issue({own, all}, [options](auto& to, auto& over) {
      return to._reduce_scatter_base(over[0], over[1], options);
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return issue({}, [options](auto& to, auto&) { return to.barrier(options); });
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> collectives(c10::intrusive_ptr<c10d::Backend> carrier) {
  return c10::make_intrusive<Collectives>(std::move(carrier));
}

}  // namespace late
