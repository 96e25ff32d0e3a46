// Endless streams of one kind of vector instruction, written so that neither compiler stage can drop or fold them:
// every result is an operand of a later instruction of the same stream, and `keep` uses the last ones.
#pragma once

#include "common.cuh"

enum class Op {
  kEx2,
  kFmnmx,
  kF2fp,
  kF2fp8,
  kFfma,
  kFmul,
  kFadd,
  kShfl,
  kHfma2,
  kSel,
  kFsel,
  kSoftmax,
  kFselSoftmax,
  kEx2Ffma1,
  kEx2Ffma2,
  kEx2Ffma4,
  kNone
};

inline const char* op_name(Op op) {
  static const char* names[] = {
      "ex2", "fmnmx", "f2fp",        "2f2fp8",           "ffma",      "fmul",      "fadd",      "shfl", "hfma2",
      "sel", "fsel",  "softmax_mix", "fsel+softmax_mix", "ex2+1ffma", "ex2+2ffma", "ex2+4ffma", "idle"};
  return names[int(op)];
}

constexpr int kStreams = 16;  // independent chains per thread

struct VectorState {
  float x[kStreams];
  float high[4], sum[4], packed[4];
  float scale, shift;
  bool flag;

  __device__ explicit VectorState(float seed) {
    for (int i = 0; i < kStreams; ++i) x[i] = 0.5f + 0.01f * (float(threadIdx.x) + seed * float(i));
    for (int i = 0; i < 4; ++i) high[i] = sum[i] = packed[i] = seed;
    scale = 0.5f + 1e-4f * seed;
    shift = -0.01f * seed;
    flag = threadIdx.x % 2;
  }
  // Keeps the results alive: the store never happens, `sink` is null at run time.
  __device__ void keep(float* sink) const {
    if (sink == nullptr) return;
    float total = 0.f;
    for (int i = 0; i < kStreams; ++i) total += x[i];
    for (int i = 0; i < 4; ++i) total += high[i] + sum[i] + packed[i];
    sink[threadIdx.x] = total;
  }
};

// One instruction on chain i, or one unit of a mix: an EX2 and n FFMA; for Op::kSoftmax one element (max, fma, ex2,
// add, half a convert).
template <Op kOp>
__device__ __forceinline__ void vector_step(VectorState& s, int i) {
  float& x = s.x[i % kStreams];
  float y = s.x[(i + 5) % kStreams];
  if constexpr (kOp == Op::kEx2) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  if constexpr (kOp == Op::kFmnmx) asm volatile("max.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  if constexpr (kOp == Op::kF2fp) {
    uint32_t packed;
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(x), "f"(y));
    x = __uint_as_float(packed);
  }
  if constexpr (kOp == Op::kF2fp8) {  // two conversions, the second packs its pair on top of the first
    uint32_t packed;
    asm volatile(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %1, %2; cvt.rn.satfinite.e4m3x2.f32 hi, %2, %1;"
        " mov.b32 %0, {lo, hi}; }"
        : "=r"(packed)
        : "f"(x), "f"(y));
    x = __uint_as_float(packed);
  }
  if constexpr (kOp == Op::kFfma) asm volatile("fma.rn.ftz.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(s.scale), "f"(s.shift));
  if constexpr (kOp == Op::kFmul) asm volatile("mul.rn.ftz.f32 %0, %0, %1;" : "+f"(x) : "f"(s.scale));
  if constexpr (kOp == Op::kFadd) asm volatile("add.rn.ftz.f32 %0, %0, %1;" : "+f"(x) : "f"(s.shift));
  if constexpr (kOp == Op::kShfl) asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 0x1f, 0xffffffff;" : "+f"(x));
  if constexpr (kOp == Op::kHfma2) {
    uint32_t word = __float_as_uint(x);
    asm volatile("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(word) : "r"(__float_as_uint(s.scale)), "r"(__float_as_uint(y)));
    x = __uint_as_float(word);
  }
  if constexpr (kOp == Op::kSel) {
    uint32_t flag = s.flag;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; selp.f32 %0, %0, %1, p; }" : "+f"(x) : "f"(y), "r"(flag));
  }
  if constexpr (kOp == Op::kFsel) {  // as in a mask: one register operand, an immediate, a predicate
    uint32_t flag = s.flag;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; selp.f32 %0, %0, 0fFF800000, p; }" : "+f"(x) : "r"(flag));
  }
  if constexpr (kOp == Op::kFselSoftmax) {
    vector_step<Op::kFsel>(s, i);
    vector_step<Op::kSoftmax>(s, i);
  }
  if constexpr (kOp == Op::kEx2Ffma1 || kOp == Op::kEx2Ffma2 || kOp == Op::kEx2Ffma4) {
    constexpr int kCount = kOp == Op::kEx2Ffma1 ? 1 : kOp == Op::kEx2Ffma2 ? 2 : 4;
    vector_step<Op::kEx2>(s, i);
    for (int f = 0; f < kCount; ++f) vector_step<Op::kFfma>(s, i + 3 + f);
  }
  if constexpr (kOp == Op::kSoftmax) {
    float &high = s.high[i % 4], &sum = s.sum[i % 4];
    asm volatile("max.f32 %0, %0, %1;" : "+f"(high) : "f"(x));
    asm volatile("fma.rn.ftz.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(s.scale), "f"(s.shift));
    asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    asm volatile("add.rn.ftz.f32 %0, %0, %1;" : "+f"(sum) : "f"(x));
    if (i % 2) {
      float& last = s.packed[(i / 2) % 4];
      uint32_t packed;
      asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(x), "f"(last));
      last = __uint_as_float(packed);
    }
  }
}

// `kCount` instructions (units of a mix), straight-line, over `kChains` independent chains.
template <Op kOp, int kCount, int kChains = kStreams>
__device__ __forceinline__ void vector_burst(VectorState& s) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) vector_step<kOp>(s, i % kChains);
}

// Idle with few instructions: a chain of dependent constant loads (LDC). The word holds its own address. The address
// goes through a shuffle, so that the compiler takes it for different in each lane and stays off the uniform datapath,
// which wgmma needs for its descriptors.
__constant__ uint64_t self_address;

__global__ void constant_address_kernel(uint64_t* out) {
  uint64_t address;
  asm volatile("cvta.to.const.u64 %0, %1;" : "=l"(address) : "l"(&self_address));
  *out = address;
}
inline void prepare_idle() {
  Buffer<uint64_t> address(1);
  constant_address_kernel<<<1, 1>>>(address.data);
  sync_and_check();
  uint64_t value = address.read()[0];
  CHECK(cudaMemcpyToSymbol(self_address, &value, sizeof value));
}
struct Idle {
  uint64_t address;
  __device__ Idle() : address(__shfl_sync(0xffffffff, self_address, 0)) {}
  __device__ __forceinline__ void hop() { asm volatile("ld.const.u64 %0, [%0];" : "+l"(address)); }
  // hops x (latency of the load + the loop around it; table `latency`, op `idle_hop`).
  __device__ __forceinline__ void operator()(int hops) {
#pragma unroll 8
    for (int i = 0; i < hops; ++i) hop();
  }
  __device__ void keep(float* sink) const {
    if (sink != nullptr) sink[blockDim.x + threadIdx.x] = float(address);
  }
};
