// What torch's C++ asks of CUDA: a guard that knows the current stream and device of a thread, and
// hooks that say that one device exists. So the autograd engine runs the backward pass of `cuda:0`
// tensors in a thread of its own, with the streams of the forward pass.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

using namespace c10;

namespace {

constexpr DeviceType kind = DeviceType::CUDA;

thread_local StreamId current_stream = 0;
thread_local DeviceIndex current_device = 0;
thread_local bool device_was_set = false; // A thread that never sets one would use GPU 0.

void choose(DeviceIndex index) {
  current_device = index;
  device_was_set = true;
}

DeviceIndex exchange(DeviceIndex index) {
  auto before = current_device;
  choose(index);
  return before;
}

// A place in a stream: behind so many kernels.
struct Point {
  StreamId stream;
  long long kernels;
};
std::mutex streams;
std::unordered_map<StreamId, long long> launched;
std::unordered_map<StreamId, std::deque<Point>> waits; // For which the next kernel has to wait.

Stream stream_of(StreamId id) { return Stream(Stream::UNSAFE, Device(kind, 0), id); }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kind; }
  Device exchangeDevice(Device d) const override { return Device(kind, exchange(d.index())); }
  Device getDevice() const override { return Device(kind, current_device); }
  void setDevice(Device d) const override { choose(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { choose(d.index()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return stream_of(current_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getNewStream(Device, int) const override { return stream_of(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override {
    static std::atomic<int> next{0};
    return stream_of(1000 + next++ % 32);
  }
  Stream exchangeStream(Stream s) const override {
    auto before = stream_of(current_stream);
    current_stream = s.id();
    return before;
  }
  bool queryStream(const Stream &) const override { return true; }
  void synchronizeStream(const Stream &) const override {}

  // Events of the engine and of futures; Python's are in streams.py.
  void record(void **event, const Stream &s, const DeviceIndex, const EventFlag) const override {
    std::lock_guard<std::mutex> held(streams);
    if (*event == nullptr)
      *event = new Point;
    *static_cast<Point *>(*event) = {s.id(), launched[s.id()]};
  }
  void block(void *event, const Stream &s) const override {
    std::lock_guard<std::mutex> held(streams);
    if (event != nullptr && static_cast<Point *>(event)->stream != s.id())
      waits[s.id()].push_back(*static_cast<Point *>(event));
  }
  bool queryEvent(void *) const override { return true; }
  void destroyEvent(void *event, const DeviceIndex) const noexcept override {
    delete static_cast<Point *>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr &, const Stream &) const override {}
};

Guard guard;

enum { relaxed = 2 }; // Of CUstreamCaptureMode, whose first is the global one.
thread_local int capture_mode = 0;
std::atomic<bool> capturing{false}; // In the global mode.
std::atomic<bool> capture_is_valid{true};

std::mutex driver; // Of the GPU's context: a call may hold it for as long as kernels run.

} // namespace

extern "C" void stand_in_install() {
  static c10::impl::DeviceGuardImplRegistrar registrar(kind, &guard);
}
extern "C" long long stand_in_stream() { return current_stream; }
extern "C" void stand_in_set_stream(long long id) { current_stream = id; }
extern "C" void stand_in_set_device(int index) { choose(static_cast<DeviceIndex>(index)); }
extern "C" bool stand_in_device_was_set() { return device_was_set; }

// Python's streams take the waits, before each launch, and count the launch. No call from here into
// Python: whoever records may hold a lock that a thread with Python's lock wants.
extern "C" bool stand_in_take_wait(long long stream, long long *other, long long *kernels) {
  std::lock_guard<std::mutex> held(streams);
  auto &queue = waits[stream];
  if (queue.empty())
    return false;
  *other = queue.front().stream;
  *kernels = queue.front().kernels;
  queue.pop_front();
  return true;
}
extern "C" void stand_in_count_launch(long long stream) {
  std::lock_guard<std::mutex> held(streams);
  ++launched[stream];
}

// An event is the address of what the query returns.
extern "C" int cuEventQuery(void *event) {
  std::lock_guard<std::mutex> held(driver);
  if (capturing && capture_mode != relaxed) {
    capture_is_valid = false;
    return 900; // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
  }
  return *static_cast<volatile int *>(event);
}
extern "C" int cuThreadExchangeStreamCaptureMode(int *mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
extern "C" void stand_in_begin_capture() {
  capture_is_valid = true;
  capturing = true;
}
extern "C" bool stand_in_end_capture() {
  capturing = false;
  return capture_is_valid;
}
extern "C" void stand_in_keep_driver_busy(double seconds) {
  std::thread([seconds] {
    std::lock_guard<std::mutex> held(driver);
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }).detach();
}

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void *) const override { return false; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return current_device_of_thread(); }
  DeviceIndex getCurrentDevice() const override { return current_device_of_thread(); }
  void setCurrentDevice(DeviceIndex index) const override { choose(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }

private:
  static DeviceIndex current_device_of_thread() { return ::current_device; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

} // namespace at
