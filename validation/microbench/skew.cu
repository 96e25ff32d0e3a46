// Warps of a warpgroup, and warpgroups, that reach their wgmma m64nNk16 at different times.
#include "common.cuh"
#include "wgmma.cuh"

constexpr int kSmemA = 8192, kRounds = 4;

struct Times {
  uint32_t start, issued, done;  // cycles after the common start
};

// Warp w of warpgroup g issues kCount instructions, delay[4 g + w] cycles after the common start, and waits for them.
// The last round counts; the first ones load the instruction cache.
template <int N, int kCount, bool kRegisters>
__global__ void __launch_bounds__(256, 1) skew_kernel(const int* delay, Times* out, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ uint32_t common;
  fill_smem(smem, kSmemA + 128 * N, 1.f);
  uint64_t a = wgmma_descriptor(smem_u32(smem)), b = wgmma_descriptor(smem_u32(smem + kSmemA));
  uint32_t registers[4] = {threadIdx.x, 1, 2, 3};
  float d[N / 2] = {};
  int warp = threadIdx.x / 32;
  Meter meter;
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    __syncthreads();
    if (threadIdx.x == 0) common = clock32() + 1000;
    __syncthreads();
    uint32_t zero = common;
    while (int32_t(clock32() - zero) < delay[warp]) {
    }
    uint32_t start = clock32();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if constexpr (kRegisters)
        Wgmma<N>::rs(d, registers, b + 2 * (k % 4));
      else
        Wgmma<N>::ss(d, a + 2 * (k % 4), b + 2 * (k % 4));
    wgmma_commit();
    uint32_t issued = clock32();
    wgmma_wait<0>();
    uint32_t done = clock32();
    if (threadIdx.x % 32 == 0) out[warp] = {start - zero, issued - zero, done - zero};
  }
  meter.stop();
  if (sink != nullptr)
    for (int i = 0; i < N / 2; ++i) sink[i * blockDim.x + threadIdx.x] = d[i];
}

template <int N, int kCount, bool kRegisters>
std::vector<Times> times(const std::vector<int>& delay) {
  static Buffer<int> delays(8);
  static Buffer<Times> out(8);
  CHECK(cudaMemcpy(delays.data, delay.data(), delay.size() * sizeof(int), cudaMemcpyHostToDevice));
  constexpr int kSmem = kSmemA + 128 * N;
  allow_smem(skew_kernel<N, kCount, kRegisters>, kSmem);
  skew_kernel<N, kCount, kRegisters><<<1, 32 * int(delay.size()), kSmem>>>(delays.data, out.data, nullptr);
  sync_and_check();
  return out.read();
}

// One warpgroup, one of its warps late.
template <int kCount, bool kRegisters>
void measure_late_warp() {
  for (int warp : {0, 2})
    for (int late : {0, 30, 100, 300, 1000}) {
      if (late == 0 && warp > 0) continue;
      std::vector<int> delay(4, 0);
      delay[warp] = late;
      auto t = times<128, kCount, kRegisters>(delay);
      uint32_t last = 0;
      for (int w = 0; w < 4; ++w) last = std::max(last, t[w].start);
      Row("late_warp")("operand", kRegisters ? "rs" : "ss")("gemm_instr", kCount)("warp", warp)("late", late)(
          "last_start", last)("issued_0", int(t[0].issued - last))("issued_1", int(t[1].issued - last))(
          "issued_3", int(t[3].issued - last))("done", int(t[0].done - last));
    }
}

// Two warpgroups, the second `head_start` later.
template <int N, int kCount, bool kRegisters>
void measure_head_start() {
  for (int head_start : {0, 20, 40, 60, 80, 100, 140, 200, 300, 400, 600, 800}) {
    std::vector<int> delay(8, 0);
    for (int w = 4; w < 8; ++w) delay[w] = head_start;
    auto t = times<N, kCount, kRegisters>(delay);
    uint32_t start[2] = {0, 0}, done[2] = {0, 0};
    for (int w = 0; w < 8; ++w) {
      start[w / 4] = std::max(start[w / 4], t[w].start);
      done[w / 4] = std::max(done[w / 4], t[w].done);
    }
    Row("head_start")("n", N)("operand", kRegisters ? "rs" : "ss")("gemm_instr", kCount)(
        "start_1", int(start[1] - start[0]))("done_0", int(done[0] - start[0]))("done_1", int(done[1] - start[0]));
  }
}

int main() {
  warm_up();
  table("late_warp",
        "one warpgroup issues gemm_instr wgmma m64n128k16, one of its warps late: cycles from the last warp's start "
        "until warps 0, 1 and 3 have issued all (before it: negative), and until the group is complete",
        {{"operand", ""},
         {"gemm_instr", ""},
         {"warp", ""},
         {"late", "cycles"},
         {"last_start", "cycles"},
         {"issued_0", "cycles"},
         {"issued_1", "cycles"},
         {"issued_3", "cycles"},
         {"done", "cycles"}});
  table("head_start",
        "two warpgroups issue gemm_instr wgmma m64nNk16 each, the second start_1 after the first: when each is complete",
        {{"n", ""},
         {"operand", ""},
         {"gemm_instr", ""},
         {"start_1", "cycles"},
         {"done_0", "cycles"},
         {"done_1", "cycles"}});
  measure_late_warp<1, false>();
  measure_late_warp<4, false>();
  measure_late_warp<16, false>();
  measure_late_warp<16, true>();
  measure_head_start<128, 8, false>();
  measure_head_start<128, 16, false>();
  measure_head_start<128, 16, true>();
  measure_head_start<176, 8, false>();
  measure_head_start<64, 12, true>();
  finish();
}
