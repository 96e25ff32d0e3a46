// Sustained SM clock under load: all SMs, windows of about 50 ms, SM cycles against the nanosecond timer.
#include "common.cuh"
#include "vector_ops.cuh"
#include "wgmma.cuh"

constexpr int kSmemA = 2 * 8192, kSmem = kSmemA + 32768;
constexpr uint64_t kWindowNs = 50000000;

enum class Load { kWgmma, kEx2, kFfma };

// Runs until `kWindowNs` have passed; CTA b reports cycles, nanoseconds and instructions of one warp.
template <Load kLoad>
__global__ void __launch_bounds__(256, 1) load_kernel(float scale, uint64_t* out, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmem, scale);
  Meter meter;
  uint64_t count = 0;
  uint64_t cycles = cycles64(), ns = global_ns(), now = ns;
  if constexpr (kLoad == Load::kWgmma) {
    uint64_t a = wgmma_descriptor(smem_u32(smem + threadIdx.x / 128 * 8192));
    uint64_t b = wgmma_descriptor(smem_u32(smem + kSmemA));
    float d[128] = {};
    while (!warpgroup_any(1 + threadIdx.x / 128, now - ns >= kWindowNs)) {
#pragma unroll 1
      for (int i = 0; i < 64; ++i) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) Wgmma<256>::ss(d, a + 2 * k, b + 2 * k);
        wgmma_commit();
        wgmma_wait<1>();
      }
      count += 256;
      now = global_ns();
    }
    wgmma_wait<0>();
    if (sink != nullptr)
      for (int i = 0; i < 128; ++i) sink[i * 256 + threadIdx.x] = d[i];
  } else {
    VectorState state(scale);
    while (now - ns < kWindowNs) {
#pragma unroll 1
      for (int i = 0; i < 16; ++i) vector_burst<kLoad == Load::kEx2 ? Op::kEx2 : Op::kFfma, 256>(state);
      count += 16 * 256;
      now = global_ns();
    }
    state.keep(sink);
  }
  meter.stop();
  if (threadIdx.x == 0) {
    out[3 * blockIdx.x] = cycles64() - cycles;
    out[3 * blockIdx.x + 1] = global_ns() - ns;
    out[3 * blockIdx.x + 2] = count;
  }
}

template <Load kLoad>
void measure(const char* name, float scale, int windows, int sms, Buffer<uint64_t>& out) {
  auto kernel = load_kernel<kLoad>;
  allow_smem(kernel, kSmem);
  for (int w = 0; w < windows; ++w) {
    kernel<<<sms, 256, kSmem>>>(scale, out.data, nullptr);
    sync_and_check();
    auto host = out.read();
    double mhz = 0, per_cycle = 0, per_ns = 0;
    for (int b = 0; b < sms; ++b) {
      mhz += 1e3 * double(host[3 * b]) / double(host[3 * b + 1]) / sms;
      per_cycle += double(host[3 * b + 2]) / double(host[3 * b]) / sms;
      per_ns += double(host[3 * b + 2]) / double(host[3 * b + 1]);
    }
    // Two warpgroups issue the MMAs of an SM; eight warps the vector instructions.
    double tensor_tflops = kLoad == Load::kWgmma ? 2 * per_ns * 2 * 64 * 256 * 16 / 1e3 : 0;
    double busy = kLoad == Load::kWgmma ? 2 * per_cycle * 128 : per_cycle * (kLoad == Load::kEx2 ? 16 : 2);
    Row("sustained_clock")("load", name)("time", 50 * (w + 1))("sm_clock", mhz)("pipe_busy", busy)("tensor_tflops",
                                                                                                   tensor_tflops);
  }
}

int main() {
  warm_up(50);
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  Buffer<uint64_t> out(3 * size_t(sms));
  table("sustained_clock",
        "mean SM clock in windows of 50 ms under load on all SMs (wgmma m64n256k16 bf16, two warpgroups)",
        {{"load", ""}, {"time", "ms"}, {"sm_clock", "MHz"}, {"pipe_busy", "fraction"}, {"tensor_tflops", "TFLOP/s"}});
  measure<Load::kWgmma>("wgmma_random", 1.f, 60, sms, out);
  measure<Load::kWgmma>("wgmma_zero", 0.f, 40, sms, out);
  measure<Load::kEx2>("ex2", 1.f, 10, sms, out);
  measure<Load::kFfma>("ffma", 1.f, 10, sms, out);
  finish();
}
