// Vector pipes and shared-memory instructions alone: latency, rate by number of warps, EX2 with FFMA, and pairs.
#include "common.cuh"
#include "vector_ops.cuh"

constexpr int kLoops = 200;

// Cycles of kLoops x 32 dependent instructions, one warp.
template <Op kOp>
__global__ void latency_kernel(uint32_t* out, float* sink) {
  VectorState state(1.f);
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 1
  for (int loop = 0; loop < kLoops; ++loop)
#pragma unroll
    for (int i = 0; i < 32; ++i) vector_step<kOp>(state, 0);
  uint32_t stop = clock32();
  meter.stop();
  *out = stop - start;
  state.keep(sink);
}

// Every warp runs kLoops bursts of 256; out[warp] holds start and stop.
template <Op kOp>
__global__ void __launch_bounds__(1024) rate_kernel(uint32_t* out, float* sink) {
  VectorState state(1.f);
  __syncthreads();
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 1
  for (int loop = 0; loop < kLoops; ++loop) vector_burst<kOp, 256>(state);
  uint32_t stop = clock32();
  meter.stop();
  out[2 * (threadIdx.x / 32)] = start;
  out[2 * (threadIdx.x / 32) + 1] = stop;
  state.keep(sink);
}

// 64 times: one A and kRatio B on other chains.
template <Op kA, Op kB, int kRatio>
__global__ void __launch_bounds__(512) pair_kernel(uint32_t* out, float* sink) {
  VectorState a(1.f), b(2.f);
  __syncthreads();
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 1
  for (int loop = 0; loop < kLoops; ++loop)
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      vector_step<kA>(a, i);
#pragma unroll
      for (int r = 0; r < kRatio; ++r) vector_step<kB>(b, i * kRatio + r);
    }
  uint32_t stop = clock32();
  meter.stop();
  out[2 * (threadIdx.x / 32)] = start;
  out[2 * (threadIdx.x / 32) + 1] = stop;
  a.keep(sink);
  b.keep(sink == nullptr ? nullptr : sink + 4096);
}

// Shared-memory instructions of 16 bytes a lane, conflict-free; chase: dependent 4-byte loads.
enum class Mem { kLd, kSt, kLdmatrix, kStmatrix, kChase };
const char* mem_name(Mem mem) {
  static const char* names[] = {"ld.shared.v4", "st.shared.v4", "ldmatrix.x4", "stmatrix.x4", "ld.shared chase"};
  return names[int(mem)];
}
template <Mem kMem>
__global__ void __launch_bounds__(512) smem_kernel(uint32_t* out, uint32_t* sink) {
  __shared__ __align__(128) uint32_t data[8192];
  for (int i = threadIdx.x; i < 8192; i += blockDim.x)
    data[i] = kMem == Mem::kChase ? smem_u32(&data[threadIdx.x % 32]) : i;
  __syncthreads();
  uint32_t address = smem_u32(data) + threadIdx.x % 32 * (kMem == Mem::kChase ? 4 : 16);
  uint32_t x[4] = {}, sum = 0;
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 1
  for (int loop = 0; loop < kLoops; ++loop)
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      uint32_t at = address + (kMem == Mem::kChase ? 0 : loop % 2 * 16384 + i * 512);
      if constexpr (kMem == Mem::kLd)
        asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at)
                     : "memory");
      if constexpr (kMem == Mem::kSt)
        asm volatile("st.volatile.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                     "r"(x[3])
                     : "memory");
      if constexpr (kMem == Mem::kLdmatrix) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at)
                     : "memory");
        sum ^= x[0];  // one LOP3 keeps the load
      }
      if constexpr (kMem == Mem::kStmatrix)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]), "r"(x[1]),
                     "r"(x[2]), "r"(x[3])
                     : "memory");
      if constexpr (kMem == Mem::kChase) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(address)::"memory");
    }
  uint32_t stop = clock32();
  meter.stop();
  out[2 * (threadIdx.x / 32)] = start;
  out[2 * (threadIdx.x / 32) + 1] = stop;
  if (sink != nullptr) sink[threadIdx.x] = x[0] + x[1] + x[2] + x[3] + sum + address;
}

__global__ void constant_chase_kernel(uint32_t* out, float* sink) {
  Idle idle;
  idle(1000);
  Meter meter;
  uint32_t start = clock32();
  idle(10000);
  uint32_t stop = clock32();
  meter.stop();
  *out = stop - start;
  idle.keep(sink);
}

// Cycles from the first start to the last stop over the warps of the CTA, median of 5 launches.
template <typename Launch>
double span(Buffer<uint32_t>& out, int warps, Launch launch) {
  return median_of(5, [&] {
    launch();
    sync_and_check();
    auto host = out.read();
    uint32_t first = host[0], last = host[1];
    for (int w = 1; w < warps; ++w) {
      if (int32_t(host[2 * w] - first) < 0) first = host[2 * w];
      if (int32_t(host[2 * w + 1] - last) > 0) last = host[2 * w + 1];
    }
    return double(last - first);
  });
}

template <Op kOp>
void measure_op(Buffer<uint32_t>& out) {
  double chain = median_of(5, [&] {
    latency_kernel<kOp><<<1, 32>>>(out.data, nullptr);
    sync_and_check();
    return double(out.read()[0]);
  });
  Row("latency")("op", op_name(kOp))("cycles", chain / (kLoops * 32));
  for (int warps : {1, 2, 4, 8, 12, 16, 32}) {
    double cycles = span(out, warps, [&] { rate_kernel<kOp><<<1, 32 * warps>>>(out.data, nullptr); });
    Row("rate")("op", op_name(kOp))("warps", warps)("lanes_per_cycle", kLoops * 256.0 * 32 * warps / cycles);
  }
}

template <int kRatio>
void measure_coissue(Buffer<uint32_t>& out) {
  for (int warps : {4, 8, 16}) {
    double cycles =
        span(out, warps, [&] { pair_kernel<Op::kEx2, Op::kFfma, kRatio><<<1, 32 * warps>>>(out.data, nullptr); });
    Row("ex2_with_ffma")("ffma_per_ex2", kRatio)("warps", warps)("cycles_per_ex2_and_sub_core",
                                                                 cycles / (kLoops * 64.0 * warps / 4));
  }
}

template <Op kA, Op kB>
void measure_pair(Buffer<uint32_t>& out) {
  constexpr int kWarps = 16;
  double cycles = span(out, kWarps, [&] { pair_kernel<kA, kB, 1><<<1, 32 * kWarps>>>(out.data, nullptr); });
  Row("pairs")("a", op_name(kA))("b", op_name(kB))("cycles_per_pair_and_sub_core",
                                                   cycles / (kLoops * 64.0 * kWarps / 4));
}

template <Op kA, Op... kBs>
void measure_pairs(Buffer<uint32_t>& out) {
  (measure_pair<kA, kBs>(out), ...);
  if constexpr (sizeof...(kBs) > 0) measure_pairs<kBs...>(out);
}

template <Mem kMem>
void measure_smem(Buffer<uint32_t>& out) {
  for (int warps : {1, 2, 4, 8, 16}) {
    if (kMem == Mem::kChase && warps > 1) break;
    double cycles = span(out, warps, [&] { smem_kernel<kMem><<<1, 32 * warps>>>(out.data, nullptr); });
    if (kMem == Mem::kChase)
      Row("latency")("op", mem_name(kMem))("cycles", cycles / (kLoops * 32));
    else
      Row("smem_rate")("op", mem_name(kMem))("warps", warps)("cycles_per_instr", cycles / (kLoops * 32.0 * warps));
  }
}

int main() {
  warm_up();
  prepare_idle();
  Buffer<uint32_t> out(64);
  table("latency",
        "dependent chain of one instruction, one warp (softmax_mix: fma then ex2; idle_hop: constant load and loop)",
        {{"op", ""}, {"cycles", "cycles"}});
  table("rate", "independent instructions by number of warps on one SM",
        {{"op", ""}, {"warps", ""}, {"lanes_per_cycle", "lanes/cycle/SM"}});
  table("ex2_with_ffma", "one EX2 and n FFMA in each warp: how many FFMA hide under an EX2",
        {{"ffma_per_ex2", ""}, {"warps", ""}, {"cycles_per_ex2_and_sub_core", "cycles"}});
  table("pairs", "a and b alternate in each of 16 warps: which share a pipe",
        {{"a", ""}, {"b", ""}, {"cycles_per_pair_and_sub_core", "cycles"}});
  table("smem_rate",
        "shared-memory instructions of 512 bytes a warp, cycles per instruction of the SM by number of warps",
        {{"op", ""}, {"warps", ""}, {"cycles_per_instr", "cycles"}});
  measure_op<Op::kEx2>(out);
  measure_op<Op::kFmnmx>(out);
  measure_op<Op::kF2fp>(out);
  measure_op<Op::kFfma>(out);
  measure_op<Op::kFmul>(out);
  measure_op<Op::kFadd>(out);
  measure_op<Op::kShfl>(out);
  measure_op<Op::kHfma2>(out);
  measure_op<Op::kSel>(out);
  measure_op<Op::kSoftmax>(out);
  double hops = median_of(5, [&] {
    constant_chase_kernel<<<1, 32>>>(out.data, nullptr);
    sync_and_check();
    return double(out.read()[0]);
  });
  Row("latency")("op", "idle_hop")("cycles", hops / 10000);
  measure_coissue<0>(out);
  measure_coissue<1>(out);
  measure_coissue<2>(out);
  measure_coissue<4>(out);
  measure_coissue<6>(out);
  measure_coissue<8>(out);
  measure_coissue<12>(out);
  measure_coissue<16>(out);
  measure_pairs<Op::kEx2, Op::kFmnmx, Op::kF2fp, Op::kFfma, Op::kFadd, Op::kShfl, Op::kHfma2, Op::kSel>(out);
  measure_smem<Mem::kLd>(out);
  measure_smem<Mem::kSt>(out);
  measure_smem<Mem::kLdmatrix>(out);
  measure_smem<Mem::kStmatrix>(out);
  measure_smem<Mem::kChase>(out);
  finish();
}
