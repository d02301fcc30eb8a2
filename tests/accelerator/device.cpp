// The device for PyTorch: streams, events, hooks and random numbers, and what Python may ask of it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "device.h"

namespace late {

namespace {

c10::DeviceIndex& device_count() {
  static c10::DeviceIndex count = 1;
  return count;
}

// Per thread, as PyTorch has it.
struct Here {
  c10::DeviceIndex device = 0;
  std::map<c10::DeviceIndex, c10::StreamId> streams;
};
Here& here() {
  thread_local Here place;
  return place;
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
}

struct EventState {
  MarkRef mark;
  bool timed;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, here().device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "late: there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) here().device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return current_stream(device.has_index() ? device.index() : here().device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.has_index() ? device.index() : here().device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream_of(device.has_index() ? device.index() : here().device, ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto before = current_stream(stream.device_index());
    here().streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Schedule::get().idle(key(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Schedule::get().synchronize(key(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Schedule::get().synchronize_device(device < 0 ? here().device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    DeviceMemory::get().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (!*event) *event = new EventState{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<EventState*>(*event)->mark = Schedule::get().record(key(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Schedule::get().wait(key(stream), static_cast<EventState*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return !event || Schedule::get().query(static_cast<EventState*>(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event) Schedule::get().synchronize(static_cast<EventState*>(event)->mark);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *begun = static_cast<EventState*>(from), *ended = static_cast<EventState*>(to);
    TORCH_CHECK(begun && ended && begun->timed && ended->timed,
                "late: both events must be recorded, and made with enable_timing");
    TORCH_CHECK(Schedule::get().reached(begun->mark) && Schedule::get().reached(ended->mark),
                "late: an event has not happened yet");
    return std::chrono::duration<double, std::milli>(ended->mark->when - begun->mark->when).count();
  }
};

// Operators draw from `twin`, since kernels of the CPU take nothing but a generator of the CPU.
struct Random final : c10::GeneratorImpl {
  explicit Random(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        twin(at::detail::createCPUGenerator()) {}
  at::Generator twin;

  void set_current_seed(uint64_t seed) override { twin.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { twin.set_offset(offset); }
  uint64_t get_offset() const override { return twin.get_offset(); }
  uint64_t current_seed() const override { return twin.current_seed(); }
  uint64_t seed() override { return twin.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    twin.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return twin.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* made = new Random(device_.index());
    made->twin = twin.clone();
    return made;
  }
};

const at::Generator& default_random(c10::DeviceIndex device) {
  static auto* made = new std::map<c10::DeviceIndex, at::Generator>();
  auto found = made->find(device);
  if (found == made->end())
    found = made->emplace(device, at::make_generator<Random>(device)).first;
  return found->second;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    TORCH_CHECK(device < device_count(), "late: there is no device ", int(device));
    here().device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override { return here().device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(here().device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 || device >= device_count() ? here().device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return LockedMemory::get().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &LockedMemory::get(); }
  c10::Device getDeviceFromPtr(void*) const override { return {TYPE, here().device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_random(device < 0 ? here().device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Random>(device < 0 ? here().device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize(storage, nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

c10::DeviceIndex current_device() { return here().device; }

c10::Stream current_stream(c10::DeviceIndex device) {
  auto found = here().streams.find(device);
  return stream_of(device, found == here().streams.end() ? 0 : found->second);
}

at::Generator twin_of(const std::optional<at::Generator>& random) {
  auto given = random && random->defined() ? *random : default_random(here().device);
  if (given.device().type() != TYPE) return given;
  return static_cast<Random*>(given.unsafeGetGeneratorImpl())->twin;
}

void resize(const c10::Storage& storage, size_t nbytes) {
  c10::DeviceGuard guard(storage.device());
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  auto made = DeviceMemory::get().allocate(nbytes);
  if (auto kept = std::min(impl->nbytes(), nbytes))
    DeviceMemory::get().copy_data(made.get(), storage.data(), kept);
  impl->set_data_ptr_noswap(std::move(made));
  impl->set_nbytes(nbytes);
}

}  // namespace late

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using late::Schedule;
  c10::SetAllocator(late::TYPE, &late::DeviceMemory::get());
  at::RegisterPrivateUse1HooksInterface(new late::Hooks());
  auto free = pybind11::call_guard<pybind11::gil_scoped_release>();
  module.def(
      "choose",
      [](const std::string& kind, uint64_t seed, int64_t patience) {
        TORCH_CHECK(kind == "late" || kind == "eager" || kind == "random",
                    "a schedule is late, eager or random, not ", kind);
        auto chosen = kind == "late"    ? Schedule::Kind::LATE
                      : kind == "eager" ? Schedule::Kind::EAGER
                                        : Schedule::Kind::RANDOM;
        Schedule::get().choose(chosen, seed, patience);
      },
      free);
  module.def("set_devices", [](int count) { late::device_count() = c10::DeviceIndex(count); });
  module.def("set_memory", [](size_t nbytes) { late::DeviceMemory::get().total = nbytes; });
  module.def("lock", [](uintptr_t at, size_t nbytes) { late::LockedMemory::get().lock(at, nbytes); });
  module.def("unlock", [](uintptr_t at) { late::LockedMemory::get().unlock(at); });
  module.def("steps_run", [] { return Schedule::get().steps(); });
  module.def("steps_waiting", [] { return Schedule::get().waiting(); });
  module.def("collectives", &late::collectives);
  module.def("operators", &late::operators);
  module.def("default_generator", [](int device) {
    return pybind11::reinterpret_steal<pybind11::object>(
        THPGenerator_initDefaultGenerator(late::default_random(c10::DeviceIndex(device))));
  });
}
