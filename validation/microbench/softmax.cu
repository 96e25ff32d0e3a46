// A softmax as attention kernels compute it, from accumulators in registers, beside others and beside wgmma.
// Its instructions come in blocks, as the compiler orders them: a warp issues in order, so not all classes overlap.
#include "mma_stream.cuh"

constexpr int kSmem = kMmaSmem, kIterations = 2000, kMaxWarpgroups = 3;

// One source, several builds: with rounding of denormals or without, and with a limit on registers, the compiler picks
// other registers, and what the instructions take from a running MMA changes.
enum Build { kPlain, kFtz, kFewRegisters, kFtzFewRegisters };

enum Part { kRowMax = 1, kExp = 2, kSum = 4, kConvert = 8, kRescale = 16, kAll = 31 };
inline const char* part_name(int parts) {
  switch (parts) {
    case kRowMax: return "row max";
    case kExp: return "exp";
    case kSum: return "sum";
    case kConvert: return "convert";
    case kRescale: return "rescale";
    case kAll - kRescale: return "all but rescale";
    default: return "all";
  }
}

// `kKeys` scores of each of 64 rows and an O of `kDim` columns, per warpgroup; a thread has two rows.
template <int kParts, int kKeys, int kDim, bool kFlush>
__device__ __forceinline__ void softmax(float (&s)[kKeys / 2], float (&o)[kDim / 2], uint32_t (&p)[kKeys / 4],
                                        float (&high)[2], float (&sum)[2], float (&scale)[2], float log2e) {
  auto element = [&](int row, int i) -> float& { return s[i / 2 * 4 + row * 2 + i % 2]; };
  if constexpr (kParts & kRowMax) {
    float old[2] = {high[0], high[1]};
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) high[row] = fmaxf(high[row], element(row, i));
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      high[row] = fmaxf(high[row], __shfl_xor_sync(~0u, high[row], 2));
      high[row] = fmaxf(high[row], __shfl_xor_sync(~0u, high[row], 1));
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(scale[row]) : "f"((old[row] - high[row]) * log2e));
      sum[row] *= scale[row];
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row)
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      float& x = element(row, i);
      if constexpr (kParts & kExp) {
        float shift = -high[row] * log2e, y;
        if constexpr (kFlush)
          asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(x), "f"(log2e), "f"(shift));
        else
          y = fmaf(x, log2e, shift);
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(y));
      }
      if constexpr (kParts & kSum) sum[row] += x;
    }
  if constexpr (kParts & kConvert)
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p[i]) : "f"(s[2 * i + 1]), "f"(s[2 * i]));
  if constexpr (kParts & kRescale)
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      float factor = scale[i / 2 % 2];
      if constexpr (kFlush)
        asm("mul.rn.ftz.f32 %0, %0, %1;" : "+f"(o[i]) : "f"(factor));
      else
        o[i] *= factor;
    }
}

// Repeats it. At iteration `never`, which does not come, everything is stored and loaded anew, so nothing is dead or
// constant.
template <int kParts, int kKeys, int kDim, bool kFlush>
__device__ uint32_t softmax_loop(int never, float* memory) {
  float s[kKeys / 2], o[kDim / 2], high[2] = {0, 0}, sum[2] = {0, 0}, scale[2] = {1, 1};
  uint32_t p[kKeys / 4];
  float log2e = memory[0];
  auto all = [&](bool store) {
    float* at = memory + threadIdx.x;
    auto move = [&](float& x) {
      if (store) *at = x;
      else x = *at;
      at += 512;
    };
    for (float& x : s) move(x);
    for (float& x : o) move(x);
    for (uint32_t& x : p) move(reinterpret_cast<float&>(x));
    for (int i = 0; i < 2; ++i) move(high[i]), move(sum[i]), move(scale[i]);
  };
  all(false);
  uint32_t start = clock32();
#pragma unroll 1
  for (int i = 0; i < kIterations; ++i) {
    softmax<kParts, kKeys, kDim, kFlush>(s, o, p, high, sum, scale, log2e);
    if (i == never) all(true), all(false);
  }
  uint32_t cycles = clock32() - start;
  if (never == -2) all(true);
  return cycles;
}

// `mmas` wgmma m64nNk16 in groups of 16, the queue always full; false: A in registers.
template <int N, bool kSs>
__device__ uint32_t mma_loop(int mmas, const char* smem, float* sink) {
  uint64_t a = wgmma_descriptor(smem_u32(smem)), b = wgmma_descriptor(smem_u32(smem + kMmaSmemA));
  uint32_t regs[4] = {threadIdx.x, 1, 2, 3};
  float d[N / 2] = {};
  uint32_t start = clock32();
#pragma unroll 1
  for (int i = 0; i < mmas; i += 16) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 16; ++k)
      if constexpr (kSs)
        Wgmma<N>::ss(d, a + 2 * (k % 4), b + 2 * (k % 4));
      else
        Wgmma<N>::rs(d, regs, b + 2 * (k % 4));
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  uint32_t cycles = clock32() - start;
  if (sink != nullptr)
    for (int i = 0; i < N / 2; ++i) sink[i * 512 + threadIdx.x] = d[i];
  return cycles;
}

enum Stream { kNone, kQk, kPv };  // nothing, wgmma of QK (n = keys, SS) or of PV (n = dim, RS)

template <int kParts, int kKeys, int kDim, Stream kStream, Build kBuild>
__global__ void __launch_bounds__(kBuild < kFewRegisters ? 128 * kMaxWarpgroups : 512, 1)
    softmax_kernel(int warpgroups, int mmas, int never, float* memory, uint32_t* out) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmem, 1.f);
  __syncthreads();
  Meter meter;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  uint32_t cycles = 0;
  if (group < warpgroups)
    cycles = softmax_loop<kParts, kKeys, kDim, kBuild % 2 == kFtz>(never, memory);
  else if constexpr (kStream == kQk)
    cycles = mma_loop<kKeys, true>(mmas, smem, never == -2 ? memory : nullptr);
  else if constexpr (kStream == kPv)
    cycles = mma_loop<kDim, false>(mmas, smem, never == -2 ? memory : nullptr);
  if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = cycles;
  meter.stop();
}

template <int kParts, int kKeys, int kDim, Stream kStream, Build kBuild>
void measure_softmax(int warpgroups) {
  constexpr int kWidth = kStream == kPv ? kDim : kKeys;
  static Buffer<float> memory(512 * (kKeys + kDim + 8));
  static Buffer<uint32_t> out(4 * kMaxWarpgroups);
  auto kernel = softmax_kernel<kParts, kKeys, kDim, kStream, kBuild>;
  allow_smem(kernel, kSmem);
  int ideal = kWidth / 2, groups = warpgroups + (kStream != kNone);
  std::vector<double> cycles, interval;
  for (int repeat = 0; repeat < 4; ++repeat) {
    // The stream outlasts the softmax: it goes on for as long as four times the elements' exponentials take.
    int mmas = kIterations * warpgroups * kKeys * 32 / ideal / 16 * 16 + 16000;
    kernel<<<1, 128 * groups, kSmem>>>(warpgroups, mmas, -1, memory.data, out.data);
    sync_and_check();
    auto host = out.read();
    double softmax = 0, mma = 0;
    for (int w = 0; w < 4 * groups; ++w) (w < 4 * warpgroups ? softmax : mma) += host[w] / 4.;
    softmax /= warpgroups;
    if (repeat == 0) continue;
    // MMAs after the last softmax run at their ideal rate.
    double alone = std::max(0., mma - softmax) / ideal;
    cycles.push_back(softmax / kIterations);
    interval.push_back(kStream == kNone ? 0 : std::min(mma, softmax) / (mmas - alone));
  }
  Row("softmax_parts")("build", int(kBuild))("parts", part_name(kParts))("keys", kKeys)("dim", kDim)("warpgroups", warpgroups)(
      "stream", kStream == kNone ? "none" : kStream == kQk ? "ss" : "rs")("n", kStream == kNone ? 0 : kWidth)(
      "cycles", median(cycles))("mma_cycles_per_instr", median(interval));
}

template <int kParts, int kKeys, int kDim, Build kBuild>
void measure_streams() {
  for (int warpgroups = 1; warpgroups <= 2; ++warpgroups) {
    if (kBuild == kPlain) measure_softmax<kParts, kKeys, kDim, kNone, kPlain>(warpgroups);
    measure_softmax<kParts, kKeys, kDim, kQk, kBuild>(warpgroups);
    measure_softmax<kParts, kKeys, kDim, kPv, kBuild>(warpgroups);
  }
}

template <int kKeys, int kDim, Build kBuild>
void measure_build() {
  measure_streams<kExp, kKeys, kDim, kBuild>();
  measure_streams<kAll - kRescale, kKeys, kDim, kBuild>();
  measure_streams<kAll, kKeys, kDim, kBuild>();
}

template <int kKeys, int kDim>
void measure_parts() {
  measure_streams<kRowMax, kKeys, kDim, kPlain>();
  measure_streams<kSum, kKeys, kDim, kPlain>();
  measure_streams<kConvert, kKeys, kDim, kPlain>();
  measure_streams<kRescale, kKeys, kDim, kPlain>();
  measure_build<kKeys, kDim, kPlain>();
  measure_build<kKeys, kDim, kFtz>();
  if constexpr (kKeys <= 96) {  // wider ones do not fit
    measure_build<kKeys, kDim, kFewRegisters>();
    measure_build<kKeys, kDim, kFtzFewRegisters>();
  }
}

// Two warpgroups with an endless vector stream each, and wgmma m64n128k16 SS from a third.
template <Op kFirst, int kFirstChains, Op kSecond, int kSecondChains>
__global__ void __launch_bounds__(128 * kMaxWarpgroups, 1) pair_kernel(bool mma, bool both, Count* out, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmem, 1.f);
  int group = threadIdx.x / 128;
  __shared__ uint32_t last;
  if (threadIdx.x == 0) last = kNever;
  uint32_t origin = common_origin();
  Meter meter;
  Count count;
  if (group == 0) {
    if (mma) count = mma_window<128, false>(origin, smem, &last, sink);
  } else if (group == 1) {
    count = vector_window<kFirst, kFirstChains>(origin, -1, sink);
  } else if (both) {
    count = vector_window<kSecond, kSecondChains>(origin, -1, sink);
  }
  if (threadIdx.x % 128 == 0) out[group] = count;
  meter.stop();
}

template <Op kFirst, int kFirstChains, Op kSecond = Op::kEx2, int kSecondChains = kStreams>
void measure_pair() {
  static Buffer<Count> out(kMaxWarpgroups);
  auto kernel = pair_kernel<kFirst, kFirstChains, kSecond, kSecondChains>;
  allow_smem(kernel, kSmem);
  auto rates = [&](bool mma, bool both) {
    std::vector<double> cycles[kMaxWarpgroups];
    for (int repeat = 0; repeat < 4; ++repeat) {
      kernel<<<1, 128 * kMaxWarpgroups, kSmem>>>(mma, both, out.data, nullptr);
      sync_and_check();
      auto host = out.read();
      for (int g = 0; repeat > 0 && g < kMaxWarpgroups; ++g)
        cycles[g].push_back(host[g].instr ? double(host[g].cycles) / host[g].instr : 0);
    }
    return std::vector<double>{median(cycles[0]), median(cycles[1]), median(cycles[2])};
  };
  for (bool mma : {false, true}) {
    auto alone = rates(mma, false), together = rates(mma, true);
    Row("vector_pairs")("first", op_name(kFirst))("first_chains", kFirstChains)("second", op_name(kSecond))(
        "second_chains", kSecondChains)("mma", int(mma))("first_alone", alone[1])("first_cycles", together[1])(
        "second_cycles", together[2])("mma_cycles_per_instr", together[0]);
  }
}

int main() {
  warm_up();
  table("softmax_parts",
        "parts of a softmax of `keys` scores a row from registers (O has `dim` columns), by one or two warpgroups, "
        "alone or beside an endless stream of wgmma m64nNk16, from several builds of the source: cycles per softmax of each "
        "warpgroup",
        {{"build", ""},
         {"parts", ""},
         {"keys", ""},
         {"dim", ""},
         {"warpgroups", ""},
         {"stream", ""},
         {"n", ""},
         {"cycles", "cycles"},
         {"mma_cycles_per_instr", "cycles"}});
  table("vector_pairs",
        "two warpgroups, each with an endless stream of one vector instruction over some chains of dependent ones, "
        "alone and beside wgmma m64n128k16: cycles per warp instruction, of the first also without the second",
        {{"first", ""},
         {"first_chains", ""},
         {"second", ""},
         {"second_chains", ""},
         {"mma", ""},
         {"first_alone", "cycles"},
         {"first_cycles", "cycles"},
         {"second_cycles", "cycles"},
         {"mma_cycles_per_instr", "cycles"}});
  measure_parts<64, 64>();
  measure_parts<96, 64>();
  measure_parts<128, 64>();
  measure_parts<160, 64>();
  measure_pair<Op::kFfma, 16>();
  measure_pair<Op::kFfma, 3>();
  measure_pair<Op::kFfma, 1>();
  measure_pair<Op::kFmul, 16>();
  measure_pair<Op::kFadd, 2>();
  measure_pair<Op::kFmnmx, 16>();
  measure_pair<Op::kFmnmx, 1>();
  measure_pair<Op::kF2fp, 16>();
  measure_pair<Op::kEx2, 16>();
  measure_pair<Op::kShfl, 1>();
  measure_pair<Op::kSoftmax, 16>();
  measure_pair<Op::kFmnmx, 1, Op::kFmnmx, 1>();
  measure_pair<Op::kFadd, 2, Op::kFadd, 2>();
  measure_pair<Op::kFadd, 2, Op::kFmnmx, 1>();
  measure_pair<Op::kFfma, 3, Op::kFmnmx, 1>();
  measure_pair<Op::kSoftmax, 16, Op::kFfma, 3>();
  finish();
}
