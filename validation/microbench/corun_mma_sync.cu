// The same as corun.cu beside mma.sync m16n8k16 (the instruction of FlashAttention 1 and 2), per sub-core: some warps
// issue independent MMAs, others run a vector stream, endless or in bursts of 64 with idle time between them.
#include "corun.cuh"

constexpr int kChains = 8;

__device__ __forceinline__ void mma_sync(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Warps 0 .. 4 x mma_warps - 1 issue MMAs (mma_warps on each sub-core), the rest vector work; hops < 0: endless stream.
template <Op kOp>
__global__ void __launch_bounds__(768, 1) corun_kernel(int mma_warps, int hops, Count* out, float* sink) {
  int group = threadIdx.x / 128;
  uint32_t origin = common_origin();
  Meter meter;
  Count count;
  if (group < mma_warps) {
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(noise(threadIdx.x * 8 + i)) & 0x3f803f80u;
    for (int i = 0; i < 2; ++i) b[i] = __float_as_uint(noise(threadIdx.x * 8 + 4 + i)) & 0x3f803f80u;
    float d[kChains][4] = {};
    count = windowed(origin, [&] {
#pragma unroll 1
      for (int loop = 0; loop < 4; ++loop)
#pragma unroll
        for (int i = 0; i < 8 * kChains; ++i) mma_sync(d[i % kChains], a, b);
      return 32 * kChains;
    });
    if (sink != nullptr)
      for (int i = 0; i < kChains; ++i)
        for (int j = 0; j < 4; ++j) sink[(i * 4 + j) * 768 + threadIdx.x] = d[i][j];
  } else {
    count = vector_window<kOp>(origin, hops, sink);
  }
  if (threadIdx.x % 128 == 0) out[group] = count;
  meter.stop();
}

template <Op kOp>
Result measure(int mma_warps, int vector_warps, int hops) {
  static Buffer<Count> out(6);
  int groups = mma_warps + vector_warps;
  return measure_window(out, mma_warps, groups,
                        [&] { corun_kernel<kOp><<<1, 128 * groups>>>(mma_warps, hops, out.data, nullptr); });
}

template <Op kOp>
void measure_op() {
  for (int vector_warps = 1; vector_warps <= 3; ++vector_warps) {
    double full = measure<kOp>(0, vector_warps, -1).vector_lanes;
    Row("corun_mma_sync")("mma_warps", 0)("vector", op_name(kOp))("vector_warps", vector_warps)("idle_hops", -1)(
        "duty_alone", 1)("mma_cycles_per_instr", 0)("vector_lanes_per_cycle", full)("mma_delay_per_vector_instr", 0);
    for (int mma_warps = 1; mma_warps <= 3; ++mma_warps) {
      double mma_alone = measure<kOp>(mma_warps, 0, -1).mma_interval;
      for (int hops : {-1, 0, 1, 2, 3, 4, 6, 8, 12, 16, 24}) {
        if (hops >= 0 && (vector_warps == 3 || mma_warps == 3)) continue;
        double alone = hops < 0 ? full : measure<kOp>(0, vector_warps, hops).vector_lanes;
        Result r = measure<kOp>(mma_warps, vector_warps, hops);
        Row("corun_mma_sync")("mma_warps", mma_warps)("vector", op_name(kOp))("vector_warps", vector_warps)(
            "idle_hops", hops)("duty_alone", alone / full)("mma_cycles_per_instr", r.mma_interval)(
            "vector_lanes_per_cycle", r.vector_lanes)("mma_delay_per_vector_instr", delay_per_instr(r, mma_alone));
      }
    }
  }
}

int main() {
  warm_up();
  prepare_idle();
  table("corun_mma_sync",
        "mma.sync m16n8k16 bf16 beside vector streams (warps per sub-core): cycles per MMA and sub-core; idle_hops -1 "
        "is an "
        "endless stream, else bursts of 64 with that many dependent constant loads between them",
        {{"mma_warps", ""},
         {"vector", ""},
         {"vector_warps", ""},
         {"idle_hops", ""},
         {"duty_alone", "fraction"},
         {"mma_cycles_per_instr", "cycles"},
         {"vector_lanes_per_cycle", "lanes/cycle/SM"},
         {"mma_delay_per_vector_instr", "cycles"}});
  for (int mma_warps = 1; mma_warps <= 4; ++mma_warps)
    Row("corun_mma_sync")("mma_warps", mma_warps)("vector", "none")("vector_warps", 0)("idle_hops", -1)(
        "duty_alone", 0)("mma_cycles_per_instr", measure<Op::kEx2>(mma_warps, 0, -1).mma_interval)(
        "vector_lanes_per_cycle", 0)("mma_delay_per_vector_instr", 0);
  measure_op<Op::kNone>();
  measure_op<Op::kEx2>();
  measure_op<Op::kFmnmx>();
  measure_op<Op::kF2fp>();
  measure_op<Op::kFfma>();
  measure_op<Op::kFmul>();
  measure_op<Op::kFadd>();
  measure_op<Op::kShfl>();
  measure_op<Op::kSoftmax>();
  measure_op<Op::kEx2Ffma1>();
  measure_op<Op::kEx2Ffma2>();
  measure_op<Op::kEx2Ffma4>();
  finish();
}
