// Operators of the device: those of the CPU, run later.
//
// A call is queued on the current stream with the addresses that its tensors have now, as a kernel
// launch would be, and runs on tensors of the CPU over the same memory. What it returns is allocated
// at once; how large that is was seen when the same operator ran with the same shapes before. The
// first time, the host waits for it. So it does for operators that draw random numbers, return what
// is no tensor, or whose shapes depend on values.
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "device.h"

namespace late {

void Schedule::prepare_thread() {
  c10::impl::tls_set_dispatch_key_excluded(c10::DispatchKey::Autograd, true);
  static thread_local at::AutoDispatchBelowADInplaceOrView below;
  static thread_local at::NoGradGuard no_grad;
}

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;
using Shape = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;

// With a bit that no device here has, since `parameter.data = tensor` asks for one of those that are
// known to be dense, and PyTorch 2.13 does not count PrivateUse1. The highest bit is dispatched to.
constexpr auto KEYS = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) |
                      c10::DispatchKeySet(c10::BackendComponent::HPUBit);

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TYPE;
}

StreamKey stream_here() { return key(current_stream(current_device())); }

// A tensor of the CPU over the memory that `tensor` has now.
at::Tensor cpu_over(const at::Tensor& tensor) {
  auto* at = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  auto made = at::from_blob(at + (at ? tensor.storage_offset() * tensor.itemsize() : 0),
                            tensor.sizes(), tensor.strides(), [](void*) {},
                            at::TensorOptions().dtype(tensor.dtype()));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor made_here(const Shape& shape) {
  return at::empty_strided(std::get<0>(shape), std::get<1>(shape),
                           at::TensorOptions(std::get<2>(shape)).device(TYPE, current_device()));
}

Shape shape_of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

template <class F>
void each_tensor(const IValue& value, F&& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& one : value.toListRef()) each_tensor(one, f);
  }
}

template <class F>
IValue with_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const auto& one : value.toTensorVector()) made.push_back(one.defined() ? f(one) : one);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& one : value.toOptionalTensorVector())
      made.push_back(one && one->defined() ? std::optional<at::Tensor>(f(*one)) : one);
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == TYPE) return c10::Device(c10::DeviceType::CPU);
  return value;
}

std::string signature(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  std::ostringstream text;
  text << op.operator_name();
  for (const auto& value : arguments) {
    text << '|';
    bool tensors = false;
    each_tensor(value, [&](const at::Tensor& one) {
      tensors = true;
      text << one.scalar_type() << one.sizes() << one.strides() << one.device().type()
           << one.unsafeGetTensorImpl()->is_wrapped_number() << ';';
    });
    if (!tensors) text << value;
  }
  return text.str();
}

// Operators that return shapes which depend on values.
bool by_value(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names{
      "aten::nonzero",        "aten::masked_select",  "aten::_unique2",
      "aten::unique_dim",     "aten::unique_consecutive", "aten::repeat_interleave",
      "aten::bincount",       "aten::_unique",        "aten::histc",
  };
  return names.count(op.operator_name().name) > 0;
}

// Operators of a device that take some tensors of the CPU.
bool mixes_devices(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_copy_from",
  };
  return names.count(op.operator_name().name) > 0;
}

struct Known {
  bool late = false;  // whether it may run late
  std::vector<std::optional<Shape>> results;
};

struct Seen {
  std::mutex mutex;
  std::unordered_map<std::string, Known> calls;
  std::map<std::string, int64_t> counts;
};
Seen& seen() {
  static auto* all = new Seen();
  return *all;
}

void count(const std::string& name) {
  std::lock_guard<std::mutex> lock(seen().mutex);
  ++seen().counts[name];
}

// The argument that a return of the schema is, if it is one that the operator writes to.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t result) {
  const auto* returned = schema.returns()[result].alias_info();
  if (!returned) return std::nullopt;
  for (size_t at = 0; at < schema.arguments().size(); ++at) {
    const auto* given = schema.arguments()[at].alias_info();
    if (given && given->isWrite() && *given == *returned) return at;
  }
  TORCH_CHECK(false, "late: ", schema.name(), " returns a view, and has no kernel of its own here");
}

void run_now(const c10::OperatorHandle& op, Stack* stack) {
  count("now: " + op.operator_name().name);
  at::native::cpu_fallback(op, stack);
}

void run_late(const c10::OperatorHandle& op, Stack* stack, const Known& known) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  auto inner = std::make_shared<Stack>();
  for (const auto& value : arguments)
    inner->push_back(with_tensors(value, [](const at::Tensor& one) {
      return on_device(one) ? cpu_over(one) : one.clone();  // what the host gives is read at once
    }));
  Stack results;
  std::vector<std::optional<at::Tensor>> targets;
  for (size_t at = 0; at < schema.returns().size(); ++at) {
    if (auto argument = written_argument(schema, at)) {
      results.push_back(arguments[*argument]);
      targets.emplace_back();
    } else if (known.results[at]) {
      auto made = made_here(*known.results[at]);
      targets.emplace_back(cpu_over(made));
      results.emplace_back(made);
    } else {
      results.emplace_back(at::Tensor());
      targets.emplace_back();
    }
  }
  Schedule::get().queue(stream_here(), [op, inner, targets] {
    op.callBoxed(inner.get());
    for (size_t at = 0; at < targets.size(); ++at)
      if (targets[at]) {
        const auto& got = (*inner)[at].toTensor();
        TORCH_CHECK(got.sizes() == targets[at]->sizes() && got.dtype() == targets[at]->dtype(),
                    "late: ", op.operator_name(), " returned ", got.sizes(), " and before ",
                    targets[at]->sizes(), ": its shapes depend on values");
        at::Tensor(*targets[at]).copy_(got);
      }
  });
  count(op.operator_name().name);
  torch::jit::drop(*stack, arguments.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (size_t at = 0; at < schema.returns().size(); ++at) written_argument(schema, at);

  bool random = false;
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto& type = *schema.arguments()[at].type();
    if (type.str().find("Generator") == std::string::npos) continue;
    random = true;
    auto& value = (*stack)[stack->size() - arguments.size() + at];
    value = twin_of(value.isNone() ? std::nullopt : std::optional(value.toGenerator()));
  }
  if (!mixes_devices(op))
    for (const auto& value : arguments)
      each_tensor(value, [&](const at::Tensor& one) {
        TORCH_CHECK(on_device(one) || one.dim() == 0,
                    "Expected all tensors to be on the same device, and an argument of ",
                    op.operator_name(), " is on ", one.device());
      });
  bool tensors = !random && !by_value(op);
  for (const auto& returned : schema.returns())
    tensors = tensors && returned.type()->kind() == c10::TypeKind::TensorType;
  if (!tensors) return run_now(op, stack);

  const auto called = signature(op, arguments);
  std::unique_lock<std::mutex> lock(seen().mutex);
  auto found = seen().calls.find(called);
  if (found != seen().calls.end()) {
    const Known known = found->second;
    lock.unlock();
    return known.late ? run_late(op, stack, known) : run_now(op, stack);
  }
  lock.unlock();

  const std::vector<IValue> given = arguments.vec();
  run_now(op, stack);
  Known known;
  for (const auto& result : torch::jit::last(*stack, schema.returns().size())) {
    const auto tensor = result.isNone() ? at::Tensor() : result.toTensor();
    known.results.push_back(tensor.defined() ? std::optional(shape_of(tensor)) : std::nullopt);
  }
  known.late = signature(op, given) == called;  // or it has resized what was given
  lock.lock();
  seen().calls[called] = known;
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "late: only memory of the CPU can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &DeviceMemory::get(),
                                           KEYS, c10::dtype_or_default(dtype));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "late: only memory of the CPU can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &DeviceMemory::get(),
                                   KEYS, c10::dtype_or_default(dtype), format);
}

void enlarge(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                 tensor.itemsize(), tensor.storage_offset());
  if (tensor.storage().nbytes() < needed) resize(tensor.storage(), needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  enlarge(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  enlarge(self);
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {numel}, {1});
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, &DeviceMemory::get(), true);
  return set_storage(self, at::Storage(storage), 0, {0}, {1});
}

// As the copies of CUDA: memory of the host that is not locked is read before the call returns, and
// written by then; locked memory is copied when the stream gets there.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  auto stream = stream_here();
  auto host = on_device(self) ? target : self;
  bool inside = on_device(self) && on_device(target);
  bool locked = !inside && LockedMemory::get().holds(host.storage().data());
  auto from = on_device(self) ? cpu_over(self) : locked && non_blocking ? cpu_over(self) : self.clone();
  auto to = cpu_over(target);
  Schedule::get().queue(stream, [from, to]() mutable { to.copy_(from); });
  if (locked) LockedMemory::get().used(host.storage().data(), Schedule::get().record(stream));
  if (!inside && !(non_blocking && (locked || on_device(target))))
    Schedule::get().synchronize(stream);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  return at::native::_local_scalar_dense_cpu(self.cpu());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  DeviceMemory::get().recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

std::map<std::string, int64_t> operators() {
  std::lock_guard<std::mutex> lock(seen().mutex);
  return seen().counts;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", TORCH_FN(static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(
                           at::native::view)));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("resize_", resize_);
  library.impl("set_", set_nothing);
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_.source_Storage", set_source);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
}

}  // namespace late
