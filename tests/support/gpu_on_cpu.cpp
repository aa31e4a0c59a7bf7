// A CUDA device that the CPU plays, for a torch without CUDA: see gpu_on_cpu.py.
//
// The dispatcher finds no CUDA kernels in such a torch, so it calls `fallback`, which runs those of the CPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

std::mutex guard;
std::map<std::string, long> launches;
std::atomic<long> waits{0};
std::atomic<int> sync_mode{0};
std::set<c10::GeneratorImpl*> generators;  // made for the device
const c10::Device here(c10::DeviceType::CUDA, 0);

struct Recorded {
  std::function<void()> again;
};
std::vector<Recorded>* capturing = nullptr;
thread_local bool inside = false;  // of a kernel, which the CPU runs

void wait(const char* what) {
  if (inside) return;
  TORCH_CHECK(!capturing, "CUDA error: operation not permitted when stream is capturing (", what, ")");
  ++waits;
  if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", what);
  TORCH_CHECK(sync_mode != 2, "called a synchronizing CUDA operation: ", what);
}

void count(const std::string& name) {
  if (inside) return;
  std::lock_guard<std::mutex> lock(guard);
  ++launches[name];
}

struct PlayedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = bytes ? c10::GetCPUAllocator()->raw_allocate(bytes) : nullptr;
    return {data, data, &free_it, here};
  }
  static void free_it(void* data) {
    if (data) c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_it; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PlayedAllocator allocator;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return here; }
  c10::Device getDevice() const override { return here; }
  c10::Device uncheckedGetDevice() const noexcept { return here; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, here); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, here); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, here); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, here); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasMAGMA() const override { return true; }
  std::string showConfig() const override { return "A GPU played by the CPU"; }
  long versionCUDART() const override { return 12080; }
  bool hasCUDART() const override { return true; }
  bool hasCuSOLVER() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    auto made = at::detail::createCPUGenerator();
    generators.insert(made.unsafeGetGeneratorImpl());
    return made;
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::CUDAHooksInterface;
using at::CUDAHooksArgs;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// A CPU tensor in the memory of one of ours.
at::Tensor seen_from_cpu(const at::Tensor& t) {
  if (!t.defined() || t.is_cpu()) return t;
  auto keeps = t.storage();
  auto* start = static_cast<char*>(const_cast<void*>(keeps.data())) + t.storage_offset() * t.itemsize();
  auto seen = at::from_blob(t.numel() ? start : nullptr, t.sizes(), t.strides(), [keeps](void*) {},
                            at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
  if (t.is_conj()) seen._set_conj(true);
  if (t.is_neg()) seen._set_neg(true);
  return seen;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (!self.is_cpu() && !src.is_cpu()) count("copy_");
  else if (self.is_cpu()) wait("copy to the host");
  else count("copy from the host");
  TORCH_CHECK(inside || !capturing || !src.is_cpu(), "CUDA error: operation not permitted when stream is capturing (copy of pageable memory)");
  seen_from_cpu(self).copy_(seen_from_cpu(src));
  if (capturing && !inside) capturing->push_back({[self, src] { seen_from_cpu(self).copy_(seen_from_cpu(src)); }});
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (!to.sizes().equals(self.sizes())) at::native::resize_(to, self.sizes());
  seen_from_cpu(to).copy_(seen_from_cpu(self));
  return to;
}

at::Scalar item(const at::Tensor& self) {
  wait("item");
  return seen_from_cpu(self).item();
}

const std::set<std::string> mixing = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
                                      "aten::_unsafe_index.Tensor", "aten::record_stream"};
const std::set<std::string> waiting = {"aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
                                       "aten::masked_select.out", "aten::_linalg_eigvals", "aten::linalg_eig", "aten::repeat_interleave.Tensor"};

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct Within {
    bool before = std::exchange(inside, true);
    ~Within() { inside = before; }
  } within;
  at::native::cpu_fallback(op, stack);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.operator_name().name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  bool cpu = false;
  auto look = [&](const at::Tensor& t) { cpu |= t.defined() && t.is_cpu() && t.dim() > 0; };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) look(argument.toTensor());
    else if (argument.isTensorList()) for (const at::Tensor& t : argument.toTensorVector()) look(t);
    else if (argument.isGenerator() && !inside)
      TORCH_CHECK(generators.count(argument.toGenerator().unsafeGetGeneratorImpl()),
                  "Expected a 'cuda' device type for generator but found 'cpu'");
  }
  TORCH_CHECK(!cpu || mixing.count(name), "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
  count(name);
  if (waiting.count(name)) wait(name.c_str());
  if (!capturing || inside) return by_cpu(op, stack);
  std::vector<c10::IValue> before(arguments.begin(), arguments.end());
  by_cpu(op, stack);
  const auto returned = torch::jit::last(*stack, schema.returns().size());
  std::vector<c10::IValue> results(returned.begin(), returned.end());
  capturing->push_back({[op, before, results] {
    torch::jit::Stack again(before);
    by_cpu(op, &again);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].isTensor() && results[i].toTensor().defined() && !results[i].toTensor().is_same(again[i].toTensor()))
        seen_from_cpu(results[i].toTensor()).copy_(seen_from_cpu(again[i].toTensor()));
      else if (results[i].isTensorList())
        for (size_t j = 0; j < results[i].toTensorVector().size(); ++j)
          seen_from_cpu(results[i].toTensorVector()[j]).copy_(seen_from_cpu(again[i].toTensorVector()[j]));
    }
  }});
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
    return self.set_(source, 0, size, {});
  });
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("resize_", TORCH_FN(at::native::resize_));
}

std::vector<std::unique_ptr<std::vector<Recorded>>> graphs;
std::string told;
const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator, 1);
  return true;
}();

}  // namespace

extern "C" {
const char* gpu_launches() {
  std::lock_guard<std::mutex> lock(guard);
  told.clear();
  for (const auto& [name, times] : launches) told += name + " " + std::to_string(times) + "\n";
  return told.c_str();
}
long gpu_waits() { return waits; }
void gpu_forget() {
  std::lock_guard<std::mutex> lock(guard);
  launches.clear();
  waits = 0;
}
void gpu_sync_mode(int mode) { sync_mode = mode; }
int gpu_begin() {
  graphs.push_back(std::make_unique<std::vector<Recorded>>());
  capturing = graphs.back().get();
  return static_cast<int>(graphs.size()) - 1;
}
int gpu_end() {
  capturing = nullptr;
  return static_cast<int>(graphs.back()->size());
}
int gpu_capturing() { return capturing != nullptr; }
void gpu_replay(int graph) {
  count("graph");
  for (auto& one : *graphs[graph]) one.again();
}
void gpu_free(int graph) { graphs[graph].reset(); }
}

