// One CUDA device for PyTorch's CPU build, as far as autograd and fake tensors ask for it. No kernel can run on it.
// Built and preloaded by process.py: getAccelerator must be found here before libtorch_cpu's own.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
};

const c10::impl::DeviceGuardImplRegistrar kRegistered(c10::DeviceType::CUDA, new Guard());

} // namespace

namespace at {

struct PretendedHooks final : CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", PretendedHooks)

namespace accelerator {

std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}

} // namespace accelerator
} // namespace at
