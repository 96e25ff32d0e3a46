// What a busy tensor core (wgmma) and busy vector pipes do to each other on one SM.
// One or two warpgroups issue back-to-back wgmma m64nNk16, up to three more run a stream of one vector instruction,
// either without pause or as bursts of 64 instructions with idle time between them.
#include "mma_stream.cuh"

constexpr int kSmem = kMmaSmem;

// Warpgroups that fit beside each other: the accumulators (N/2 registers a thread) set the register cap.
template <int N>
constexpr int kMaxGroups = N <= 128   ? 5
                           : N <= 192 ? 4
                                      : 3;

template <int N, bool kRs, Op kOp, int kChains, bool kFp8>
__global__ void __launch_bounds__(128 * kMaxGroups<N>, 1)
    corun_kernel(int mma_groups, int hops, Count* out, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmem, 1.f);
  int group = threadIdx.x / 128;
  __shared__ uint32_t last[2];
  if (threadIdx.x < 2) last[threadIdx.x] = kNever;
  uint32_t origin = common_origin();
  Meter meter;
  Count count;
  if (group < mma_groups) {
    count = mma_window<N, kRs, kFp8>(origin, smem, &last[group], sink);
  } else {
    count = vector_window<kOp, kChains>(origin, hops, sink);
  }
  if (threadIdx.x % 128 == 0) out[group] = count;
  meter.stop();
}

template <int N, bool kRs, Op kOp, int kChains = kStreams, bool kFp8 = false>
Result measure(int mma_groups, int vector_groups, int hops) {
  static Buffer<Count> out(kMaxGroups<N>);
  auto kernel = corun_kernel<N, kRs, kOp, kChains, kFp8>;
  allow_smem(kernel, kSmem);
  int groups = mma_groups + vector_groups;
  return measure_window(out, mma_groups, groups,
                        [&] { kernel<<<1, 128 * groups, kSmem>>>(mma_groups, hops, out.data, nullptr); });
}

template <int N, bool kRs, Op kOp>
void measure_full(double mma_alone, const char* table_name = "corun") {
  for (int mma_groups = 1; mma_groups <= 2; ++mma_groups)
    for (int vector_groups = 1; vector_groups <= std::min(3, kMaxGroups<N> - mma_groups); ++vector_groups) {
      Result r = measure<N, kRs, kOp>(mma_groups, vector_groups, -1);
      Row(table_name)("n", N)("operand", kRs ? "rs" : "ss")("mma_groups", mma_groups)("vector", op_name(kOp))(
          "vector_groups", vector_groups)("mma_cycles_per_instr", r.mma_interval)("mma_ideal", N / 2)(
          "vector_lanes_per_cycle", r.vector_lanes)("mma_delay_per_vector_instr", delay_per_instr(r, mma_alone));
    }
}

template <int N, bool kRs, Op kOp>
void measure_duty(double mma_alone) {
  for (int vector_groups = 1; vector_groups <= 2; ++vector_groups) {
    double full = measure<N, kRs, kOp>(0, vector_groups, -1).vector_lanes;
    for (int hops : {0, 1, 2, 3, 4, 6, 8, 12, 16, 24}) {
      double alone = measure<N, kRs, kOp>(0, vector_groups, hops).vector_lanes;
      Result r = measure<N, kRs, kOp>(1, vector_groups, hops);
      Row("corun_duty")("n", N)("operand", kRs ? "rs" : "ss")("vector", op_name(kOp))("vector_groups", vector_groups)(
          "idle_hops", hops)("duty_alone", alone / full)("vector_lanes_alone", alone)(
          "mma_cycles_per_instr", r.mma_interval)("mma_alone", mma_alone)("vector_lanes_per_cycle", r.vector_lanes)(
          "mma_delay_per_vector_instr", delay_per_instr(r, mma_alone));
    }
  }
}

template <int N, bool kRs, Op kOp, int kBurst>
__global__ void __launch_bounds__(128 * kMaxGroups<N>, 1) burst_kernel(int hops, Count* out, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmem, 1.f);
  int group = threadIdx.x / 128;
  __shared__ uint32_t last;
  if (threadIdx.x == 0) last = kNever;
  uint32_t origin = common_origin();
  Meter meter;
  Count count = group == 0 ? mma_bursts<N, kRs, kBurst>(origin, hops, smem, &last, sink)
                           : vector_window<kOp, kStreams>(origin, -1, sink);
  if (threadIdx.x % 128 == 0) out[group] = count;
  meter.stop();
}

// Does vector work slow down in proportion to the time the tensor core works?
template <int N, bool kRs, Op kOp, int kBurst>
void measure_mma_duty() {
  static Buffer<Count> out(kMaxGroups<N>);
  auto kernel = burst_kernel<N, kRs, kOp, kBurst>;
  allow_smem(kernel, kSmem);
  for (int vector_groups = 1; vector_groups <= 2; ++vector_groups) {
    double alone = measure<N, kRs, kOp>(0, vector_groups, -1).vector_lanes;
    double full = measure<N, kRs, kOp>(1, vector_groups, -1).vector_lanes;
    for (int hops : {0, 2, 4, 8, 16, 32}) {
      int groups = 1 + vector_groups;
      Result r = measure_window(out, 1, groups, [&] { kernel<<<1, 128 * groups, kSmem>>>(hops, out.data, nullptr); });
      Row("corun_mma_duty")("n", N)("operand", kRs ? "rs" : "ss")("burst", kBurst)("vector", op_name(kOp))(
          "vector_groups", vector_groups)("idle_hops", hops)("mma_cycles_per_instr", r.mma_interval)(
          "mma_ideal", N / 2)("vector_lanes_per_cycle", r.vector_lanes)("vector_lanes_alone", alone)(
          "vector_lanes_beside", full);
    }
  }
}

template <int N, bool kRs, int kBurst>
void measure_mma_duties() {
  measure_mma_duty<N, kRs, Op::kEx2, kBurst>();
  measure_mma_duty<N, kRs, Op::kFmnmx, kBurst>();
  measure_mma_duty<N, kRs, Op::kShfl, kBurst>();
  measure_mma_duty<N, kRs, Op::kSoftmax, kBurst>();
}

// A vector stream at a rate set by its dependent chains: about one instruction per 4.2 cycles, chain and warp.
template <int N, bool kRs, Op kOp, int kChains>
void measure_chains(double mma_alone) {
  for (int vector_groups = 1; vector_groups <= 2; ++vector_groups) {
    Result r = measure<N, kRs, kOp, kChains>(1, vector_groups, -1);
    double alone = measure<N, kRs, kOp, kChains>(0, vector_groups, -1).vector_lanes;
    Row("corun_chains")("n", N)("operand", kRs ? "rs" : "ss")("vector", op_name(kOp))("chains", kChains)(
        "vector_groups", vector_groups)("vector_lanes_alone", alone)("mma_cycles_per_instr", r.mma_interval)(
        "mma_alone", mma_alone)("vector_lanes_per_cycle", r.vector_lanes)("mma_delay_per_vector_instr",
                                                                          delay_per_instr(r, mma_alone));
  }
}

template <int N, bool kRs>
void measure_width() {
  double alone = 0;
  for (int mma_groups = 2; mma_groups >= 1; --mma_groups) {
    Result r = measure<N, kRs, Op::kEx2>(mma_groups, 0, -1);
    alone = r.mma_interval;
    Row("corun")("n", N)("operand", kRs ? "rs" : "ss")("mma_groups", mma_groups)("vector", "none")("vector_groups", 0)(
        "mma_cycles_per_instr", alone)("mma_ideal", N / 2)("vector_lanes_per_cycle", 0)("mma_delay_per_vector_instr",
                                                                                        0);
  }
  measure_full<N, kRs, Op::kEx2>(alone);
  measure_full<N, kRs, Op::kFmnmx>(alone);
  measure_full<N, kRs, Op::kF2fp>(alone);
  measure_full<N, kRs, Op::kFfma>(alone);
  measure_full<N, kRs, Op::kFmul>(alone);
  measure_full<N, kRs, Op::kFadd>(alone);
  measure_full<N, kRs, Op::kShfl>(alone);
  measure_full<N, kRs, Op::kSoftmax>(alone);
  measure_full<N, kRs, Op::kEx2Ffma1>(alone);
  measure_full<N, kRs, Op::kEx2Ffma2>(alone);
  measure_full<N, kRs, Op::kEx2Ffma4>(alone);
  measure_chains<N, kRs, Op::kFfma, 1>(alone);
  measure_chains<N, kRs, Op::kFfma, 2>(alone);
  measure_chains<N, kRs, Op::kFfma, 3>(alone);
  measure_chains<N, kRs, Op::kFfma, 4>(alone);
  measure_chains<N, kRs, Op::kFmnmx, 1>(alone);
  measure_chains<N, kRs, Op::kFmnmx, 2>(alone);
  measure_chains<N, kRs, Op::kShfl, 1>(alone);
  measure_chains<N, kRs, Op::kEx2, 1>(alone);
  measure_chains<N, kRs, Op::kFadd, 1>(alone);
  measure_chains<N, kRs, Op::kFadd, 2>(alone);
  measure_chains<N, kRs, Op::kFadd, 3>(alone);
  measure_chains<N, kRs, Op::kFadd, 4>(alone);
  measure_duty<N, kRs, Op::kNone>(alone);
  measure_duty<N, kRs, Op::kEx2>(alone);
  measure_duty<N, kRs, Op::kFmnmx>(alone);
  measure_duty<N, kRs, Op::kFfma>(alone);
  measure_duty<N, kRs, Op::kFmul>(alone);
  measure_duty<N, kRs, Op::kSoftmax>(alone);
}

template <int N, bool kRs>
void measure_mask() {
  double alone = measure<N, kRs, Op::kFsel>(1, 0, -1).mma_interval;
  measure_full<N, kRs, Op::kFsel>(alone, "corun_mask");
  measure_full<N, kRs, Op::kSoftmax>(alone, "corun_mask");
  measure_full<N, kRs, Op::kFselSoftmax>(alone, "corun_mask");
}

template <int N, bool kRs, Op kOp>
void measure_fp8_op(int mma_groups, double mma_alone) {
  for (int vector_groups = 1; vector_groups <= std::min(2, kMaxGroups<N> - mma_groups); ++vector_groups) {
    Result r = measure<N, kRs, kOp, kStreams, true>(mma_groups, vector_groups, -1);
    Row("corun_fp8")("n", N)("operand", kRs ? "rs" : "ss")("mma_groups", mma_groups)("vector", op_name(kOp))(
        "vector_groups", vector_groups)("mma_cycles_per_instr", r.mma_interval)("mma_ideal", N / 2)(
        "vector_lanes_per_cycle", r.vector_lanes)("mma_delay_per_vector_instr", delay_per_instr(r, mma_alone));
  }
}

template <int N, bool kRs>
void measure_fp8() {
  for (int mma_groups = 1; mma_groups <= 2; ++mma_groups) {
    double alone = measure<N, kRs, Op::kEx2, kStreams, true>(mma_groups, 0, -1).mma_interval;
    Row("corun_fp8")("n", N)("operand", kRs ? "rs" : "ss")("mma_groups", mma_groups)("vector", "none")(
        "vector_groups", 0)("mma_cycles_per_instr", alone)("mma_ideal", N / 2)("vector_lanes_per_cycle", 0)(
        "mma_delay_per_vector_instr", 0);
    measure_fp8_op<N, kRs, Op::kEx2>(mma_groups, alone);
    measure_fp8_op<N, kRs, Op::kFmnmx>(mma_groups, alone);
    measure_fp8_op<N, kRs, Op::kF2fp>(mma_groups, alone);
    measure_fp8_op<N, kRs, Op::kF2fp8>(mma_groups, alone);
    measure_fp8_op<N, kRs, Op::kFfma>(mma_groups, alone);
    measure_fp8_op<N, kRs, Op::kFmul>(mma_groups, alone);
    measure_fp8_op<N, kRs, Op::kFadd>(mma_groups, alone);
    measure_fp8_op<N, kRs, Op::kShfl>(mma_groups, alone);
    measure_fp8_op<N, kRs, Op::kSoftmax>(mma_groups, alone);
  }
}

template <Op kOp>
void measure_alone() {
  for (int vector_groups = 1; vector_groups <= 3; ++vector_groups) {
    Result r = measure<64, false, kOp>(0, vector_groups, -1);
    Row("corun")("n", 0)("operand", "none")("mma_groups", 0)("vector", op_name(kOp))("vector_groups", vector_groups)(
        "mma_cycles_per_instr", 0)("mma_ideal", 0)("vector_lanes_per_cycle", r.vector_lanes)(
        "mma_delay_per_vector_instr", 0);
  }
}

int main() {
  warm_up();
  prepare_idle();
  const std::initializer_list<std::pair<const char*, const char*>> columns = {
      {"n", ""},
      {"operand", ""},
      {"mma_groups", ""},
      {"vector", ""},
      {"vector_groups", ""},
      {"mma_cycles_per_instr", "cycles"},
      {"mma_ideal", "cycles"},
      {"vector_lanes_per_cycle", "lanes/cycle/SM"},
      {"mma_delay_per_vector_instr", "cycles"},
  };
  table("corun",
        "wgmma m64nNk16 beside endless vector streams: cycles per wgmma of the SM, vector lanes (softmax_mix: "
        "elements) per "
        "cycle and SM, cycles of tensor-core time lost per vector instruction of a warp",
        columns);
  table("corun_duty",
        "the same with bursts of 64 vector instructions and idle_hops dependent constant loads between them; "
        "duty_alone is "
        "the vector rate without wgmma relative to an endless stream",
        {{"n", ""},
         {"operand", ""},
         {"vector", ""},
         {"vector_groups", ""},
         {"idle_hops", ""},
         {"duty_alone", "fraction"},
         {"vector_lanes_alone", "lanes/cycle/SM"},
         {"mma_cycles_per_instr", "cycles"},
         {"mma_alone", "cycles"},
         {"vector_lanes_per_cycle", "lanes/cycle/SM"},
         {"mma_delay_per_vector_instr", "cycles"}});
  table("corun_chains",
        "the same with an endless stream over few dependent chains in each warp, so at an even, partial rate",
        {{"n", ""},
         {"operand", ""},
         {"vector", ""},
         {"chains", ""},
         {"vector_groups", ""},
         {"vector_lanes_alone", "lanes/cycle/SM"},
         {"mma_cycles_per_instr", "cycles"},
         {"mma_alone", "cycles"},
         {"vector_lanes_per_cycle", "lanes/cycle/SM"},
         {"mma_delay_per_vector_instr", "cycles"}});
  table("corun_fp8", "table corun with FP8 operands (m64nNk32); 2f2fp8 counts two conversions as one",
        columns);
  table("corun_mask", "table corun with an FSEL of one register operand, alone and before each element of softmax_mix",
        columns);
  table("corun_mma_duty",
        "one warpgroup issues bursts of wgmma, waits for them and idles; vector streams without pause beside it",
        {{"n", ""},
         {"operand", ""},
         {"burst", ""},
         {"vector", ""},
         {"vector_groups", ""},
         {"idle_hops", ""},
         {"mma_cycles_per_instr", "cycles"},
         {"mma_ideal", "cycles"},
         {"vector_lanes_per_cycle", "lanes/cycle/SM"},
         {"vector_lanes_alone", "lanes/cycle/SM"},
         {"vector_lanes_beside", "lanes/cycle/SM"}});
  measure_alone<Op::kEx2>();
  measure_alone<Op::kFmnmx>();
  measure_alone<Op::kF2fp>();
  measure_alone<Op::kF2fp8>();
  measure_alone<Op::kFfma>();
  measure_alone<Op::kFmul>();
  measure_alone<Op::kFadd>();
  measure_alone<Op::kShfl>();
  measure_alone<Op::kSoftmax>();
  measure_alone<Op::kEx2Ffma1>();
  measure_alone<Op::kEx2Ffma2>();
  measure_alone<Op::kEx2Ffma4>();
  measure_width<64, false>();
  measure_width<64, true>();
  measure_width<128, false>();
  measure_width<128, true>();
  measure_width<176, false>();
  measure_width<176, true>();
  measure_width<192, false>();
  measure_width<192, true>();
  measure_width<256, false>();
  measure_width<256, true>();
  measure_fp8<64, true>();
  measure_fp8<128, true>();
  measure_fp8<128, false>();
  measure_fp8<160, false>();
  measure_fp8<224, false>();
  measure_fp8<256, true>();
  measure_mask<64, true>();
  measure_mask<128, false>();
  measure_mask<128, true>();
  measure_mask<256, true>();
  measure_mma_duties<64, true, 2>();
  measure_mma_duties<64, true, 10>();
  measure_mma_duties<128, false, 2>();
  measure_mma_duties<128, false, 8>();
  measure_mma_duties<192, false, 4>();
  finish();
}
