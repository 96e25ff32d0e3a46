// Interval, group drain and depth of the issue queue of wgmma m64nNk16 (bf16, and m64nNk32 in fp8), from one warpgroup.
#include "common.cuh"
#include "wgmma.cuh"

constexpr int kSmemA = 8192, kSmemB = 32768;  // 64 and 256 rows of 64 bf16: four k-steps of 16

template <int N, bool kFp8 = false>
struct Operands {
  uint64_t a, b;
  uint32_t regs[4];
  __device__ explicit Operands(char* smem)
      : a(wgmma_descriptor(smem_u32(smem))), b(wgmma_descriptor(smem_u32(smem + kSmemA))) {
    for (int i = 0; i < 4; ++i) regs[i] = reinterpret_cast<uint32_t*>(smem)[threadIdx.x * 4 + i];
  }
  // k-step `step` of the tile: 32 bytes further in the swizzled rows.
  template <bool kRs>
  __device__ __forceinline__ void mma(float (&d)[N / 2], int step) const {
    uint64_t offset = 2 * (step % 4);
    if constexpr (kRs)
      Wgmma<N, kFp8>::rs(d, regs, b + offset);
    else
      Wgmma<N, kFp8>::ss(d, a + offset, b + offset);
  }
};

template <int N>
__device__ __forceinline__ void keep(const float (&d)[N / 2], float* sink) {
  if (sink != nullptr)
    for (int i = 0; i < N / 2; ++i) sink[i * 128 + threadIdx.x] = d[i];
}

// `groups` commit groups of K instructions; at most `pending` (0 or 1) groups in flight. Returns cycles until all is
// done.
template <int N, bool kRs, int K, bool kFp8 = false>
__global__ void __launch_bounds__(128, 1) group_kernel(int groups, int pending, uint32_t* cycles, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmemA + kSmemB, 1.f);
  Operands<N, kFp8> operands(smem);
  float d[N / 2] = {};
  Meter meter;
  __syncthreads();
  uint32_t start = clock32();
#pragma unroll 1
  for (int g = 0; g < groups; ++g) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; ++k) operands.template mma<kRs>(d, k);
    wgmma_commit();
    if (pending)
      wgmma_wait<1>();
    else
      wgmma_wait<0>();
  }
  wgmma_wait<0>();
  uint32_t stop = clock32();
  meter.stop();
  if (threadIdx.x == 0) *cycles = stop - start;
  keep<N>(d, sink);
}

// Stamps before each of 24 instructions of one group, and after the wait.
constexpr int kProfile = 24;
template <int N, bool kRs>
__global__ void __launch_bounds__(128, 1) profile_kernel(uint32_t* stamps, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmemA + kSmemB, 1.f);
  Operands<N> operands(smem);
  float d[N / 2] = {};
  Meter meter;
  uint32_t stamp[kProfile + 1];
#pragma unroll 1
  for (int repeat = 0; repeat < 2; ++repeat) {  // the first pass fills the instruction cache
    __syncthreads();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kProfile; ++k) {
      stamp[k] = clock32();
      operands.template mma<kRs>(d, k);
    }
    wgmma_commit();
    wgmma_wait<0>();
    stamp[kProfile] = clock32();
  }
  meter.stop();
  if (threadIdx.x == 0)
    for (int k = 0; k <= kProfile; ++k) stamps[k] = stamp[k] - stamp[0];
  keep<N>(d, sink);
}

template <int N, bool kRs, int K, bool kFp8>
void measure_group(Buffer<uint32_t>& out) {
  auto kernel = group_kernel<N, kRs, K, kFp8>;
  allow_smem(kernel, kSmemA + kSmemB);
  auto run = [&](int groups, int pending) {
    return median_of(7, [&] {
      kernel<<<1, 128, kSmemA + kSmemB>>>(groups, pending, out.data, nullptr);
      sync_and_check();
      return double(out.read()[0]);
    });
  };
  const char* operand = kRs ? "rs" : "ss";
  for (int pending = 0; pending < 2; ++pending) {
    double period = (run(192, pending) - run(64, pending)) / 128;
    Row(kFp8 ? "wgmma_fp8" : "wgmma_interval")("n", N)("operand", operand)("instr_per_group", K)(
        "groups_in_flight", pending + 1)("cycles_per_instr", period / K);
  }
}

template <int N, bool kFp8 = false>
void measure_width(Buffer<uint32_t>& out) {
  measure_group<N, false, 1, kFp8>(out);
  measure_group<N, false, 2, kFp8>(out);
  measure_group<N, false, 4, kFp8>(out);
  measure_group<N, false, 8, kFp8>(out);
  measure_group<N, true, 1, kFp8>(out);
  measure_group<N, true, 2, kFp8>(out);
  measure_group<N, true, 4, kFp8>(out);
  measure_group<N, true, 8, kFp8>(out);
}

template <int N, bool kRs>
void measure_profile(Buffer<uint32_t>& out) {
  auto kernel = profile_kernel<N, kRs>;
  allow_smem(kernel, kSmemA + kSmemB);
  std::vector<std::vector<double>> stamps(kProfile + 1);
  for (int launch = 0; launch < 9; ++launch) {
    kernel<<<1, 128, kSmemA + kSmemB>>>(out.data, nullptr);
    sync_and_check();
    auto host = out.read();
    for (int k = 0; k <= kProfile; ++k) stamps[k].push_back(host[k]);
  }
  for (int k = 0; k <= kProfile; ++k)
    Row("wgmma_issue_profile")("n", N)("operand", kRs ? "rs" : "ss")("index", k)("issue_cycle", median(stamps[k]));
}

int main() {
  warm_up();
  Buffer<uint32_t> out(64);
  table(
      "wgmma_interval",
      "steady-state issue interval of wgmma m64nNk16 by width, operand A, group size and groups in flight",
      {{"n", ""}, {"operand", ""}, {"instr_per_group", ""}, {"groups_in_flight", ""}, {"cycles_per_instr", "cycles"}});
  table("wgmma_fp8", "table wgmma_interval with FP8 operands (m64nNk32)",
        {{"n", ""}, {"operand", ""}, {"instr_per_group", ""}, {"groups_in_flight", ""}, {"cycles_per_instr", "cycles"}});
  table("wgmma_issue_profile",
        "cycle at which each of 24 instructions is issued from idle (index 24: all complete): depth of the issue queue",
        {{"n", ""}, {"operand", ""}, {"index", ""}, {"issue_cycle", "cycles"}});
  measure_width<8>(out);
  measure_width<16>(out);
  measure_width<32>(out);
  measure_width<64>(out);
  measure_width<96>(out);
  measure_width<128>(out);
  measure_width<160>(out);
  measure_width<176>(out);
  measure_width<192>(out);
  measure_width<224>(out);
  measure_width<256>(out);
  measure_width<64, true>(out);
  measure_width<128, true>(out);
  measure_width<160, true>(out);
  measure_width<224, true>(out);
  measure_width<256, true>(out);
  measure_profile<64, false>(out);
  measure_profile<64, true>(out);
  measure_profile<128, false>(out);
  measure_profile<128, true>(out);
  measure_profile<256, false>(out);
  measure_profile<256, true>(out);
  finish();
}
