// How the tensor core takes wgmma m64n128k16 (operands from shared memory) from one to three warpgroups.
#include "common.cuh"
#include "vector_ops.cuh"
#include "wgmma.cuh"

constexpr int kN = 128, kIdeal = kN / 2;
constexpr int kSmemA = 8192, kSmem = kSmemA + 128 * kN;

struct Tile {
  uint64_t a, b;
  __device__ explicit Tile(char* smem)
      : a(wgmma_descriptor(smem_u32(smem))), b(wgmma_descriptor(smem_u32(smem + kSmemA))) {}
  template <int kCount>
  __device__ __forceinline__ void gemm(float (&d)[kN / 2]) const {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kCount; ++k) Wgmma<kN>::ss(d, a + 2 * (k % 4), b + 2 * (k % 4));
    wgmma_commit();
  }
};
__device__ __forceinline__ void keep(const float (&d)[kN / 2], float* sink) {
  if (sink != nullptr)
    for (int i = 0; i < kN / 2; ++i) sink[i * blockDim.x + threadIdx.x] = d[i];
}

struct Phases {
  uint32_t total, issue, wait, vector;
};

// Each warpgroup repeats: [its turn] issue G instructions [pass the turn], wait for them, 64 x bursts EX2 per warp.
template <int G>
__global__ void __launch_bounds__(384, 1)
    turns_kernel(bool ordered, int bursts, int iterations, Phases* out, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmem, 1.f);
  Tile tile(smem);
  float d[kN / 2] = {};
  VectorState vector(1.f);
  int group = threadIdx.x / 128, groups = blockDim.x / 128;
  int next = (group + 1) % groups;
  if (ordered && group == groups - 1) bar_arrive(1, 256);
  Phases phases{};
  __syncthreads();
  Meter meter;
  uint32_t begin = clock32();
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    uint32_t t0 = clock32();
    if (ordered) bar_sync(1 + group, 256);
    tile.gemm<G>(d);
    if (ordered && !(i == iterations - 1 && group == groups - 1)) bar_arrive(1 + next, 256);
    uint32_t t1 = clock32();
    wgmma_wait<0>();
    uint32_t t2 = clock32();
#pragma unroll 1
    for (int b = 0; b < bursts; ++b) vector_burst<Op::kEx2, 64>(vector);
    uint32_t t3 = clock32();
    phases.issue += t1 - t0;
    phases.wait += t2 - t1;
    phases.vector += t3 - t2;
  }
  phases.total = clock32() - begin;
  meter.stop();
  if (threadIdx.x % 128 == 0) out[group] = phases;
  keep(d, sink);
  vector.keep(sink);
}

template <int G>
void measure_turns(Buffer<Phases>& out) {
  auto kernel = turns_kernel<G>;
  allow_smem(kernel, kSmem);
  constexpr int kIterations = 200;
  for (int groups = 1; groups <= 3; ++groups)
    for (int ordered = 0; ordered <= (groups > 1); ++ordered)
      for (int ex2_cycles : {0, 512, 1024, 1536}) {
        double total = 0, issue = 0, wait = 0, vector = 0;
        constexpr int kLaunches = 5;
        for (int launch = 0; launch <= kLaunches; ++launch) {
          kernel<<<1, 128 * groups, kSmem>>>(ordered, ex2_cycles / 512, kIterations, out.data, nullptr);
          sync_and_check();
          if (launch == 0) continue;
          auto host = out.read();
          for (int g = 0; g < groups; ++g) {
            double scale = 1.0 / (groups * kLaunches * kIterations);
            total += host[g].total * scale;
            issue += host[g].issue * scale;
            wait += host[g].wait * scale;
            vector += host[g].vector * scale;
          }
        }
        Row("wgmma_turns")("warpgroups", groups)("order", ordered ? "pingpong" : "free")("gemm_instr", G)(
            "gemm_cycles", G * kIdeal)("ex2_cycles", ex2_cycles)("cycles_per_iteration", total)("issue", issue)(
            "wait", wait)("vector", vector)("tensor_busy", groups * G * kIdeal / total);
      }
}

// Group 0 issues G instructions at once, group 1 its G after `hops` idle hops. out: start, issued and done of each
// group.
template <int G>
__global__ void __launch_bounds__(256, 1) arrival_kernel(int hops, uint32_t* out, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmem, 1.f);
  Tile tile(smem);
  Idle idle;
  float d[kN / 2] = {};
  int group = threadIdx.x / 128;
  uint32_t start = 0, issued = 0, done = 0;
  Meter meter;
#pragma unroll 1
  for (int repeat = 0; repeat < 3; ++repeat) {  // the first passes fill the instruction cache
    __syncthreads();
    if (group == 1) idle(hops);
    start = clock32();
    tile.gemm<G>(d);
    issued = clock32();
    wgmma_wait<0>();
    done = clock32();
  }
  meter.stop();
  if (threadIdx.x % 128 == 0) {
    out[3 * group] = start;
    out[3 * group + 1] = issued;
    out[3 * group + 2] = done;
  }
  keep(d, sink);
  idle.keep(sink);
}
template <int G>
void measure_arrival(Buffer<uint32_t>& out) {
  auto kernel = arrival_kernel<G>;
  allow_smem(kernel, kSmem);
  for (int hops : {0, 1, 2, 4, 6, 8, 12}) {
    std::vector<double> values[6];
    for (int launch = 0; launch < 9; ++launch) {
      kernel<<<1, 256, kSmem>>>(hops, out.data, nullptr);
      sync_and_check();
      auto host = out.read();
      for (int i = 0; i < 6; ++i) values[i].push_back(int32_t(host[i] - host[0]));
    }
    Row("wgmma_arrival_order")("gemm_instr", G)("start_1", median(values[3]))("issued_0", median(values[1]))(
        "done_0", median(values[2]))("issued_1", median(values[4]))("done_1", median(values[5]));
  }
}

// Endless streams of groups of four: who gets how much?
__global__ void __launch_bounds__(384, 1) share_kernel(uint32_t window, uint32_t* counts, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  fill_smem(smem, kSmem, 1.f);
  Tile tile(smem);
  float d[kN / 2] = {};
  uint32_t count = 0;
  __syncthreads();
  Meter meter;
  uint32_t start = clock32();
  while (!warpgroup_any(1 + threadIdx.x / 128, clock32() - start >= window)) {
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      tile.gemm<4>(d);
      wgmma_wait<1>();
    }
    count += 128;
  }
  wgmma_wait<0>();
  meter.stop();
  if (threadIdx.x % 128 == 0) counts[threadIdx.x / 128] = count;
  keep(d, sink);
}

int main() {
  warm_up();
  prepare_idle();
  Buffer<Phases> phases(3);
  Buffer<uint32_t> out(6);
  table("wgmma_turns",
        "1 to 3 warpgroups each issue gemm_instr wgmma m64n128k16, wait, then run EX2; free or with a named-barrier "
        "order "
        "(turn passed after issue); mean cycles per iteration and of its phases",
        {{"warpgroups", ""},
         {"order", ""},
         {"gemm_instr", ""},
         {"gemm_cycles", "cycles"},
         {"ex2_cycles", "cycles"},
         {"cycles_per_iteration", "cycles"},
         {"issue", "cycles"},
         {"wait", "cycles"},
         {"vector", "cycles"},
         {"tensor_busy", "fraction"}});
  table("wgmma_arrival_order",
        "two warpgroups queue gemm_instr wgmma m64n128k16 each, group 0 at cycle 0, group 1 at start_1: end of issue, "
        "completion",
        {{"gemm_instr", ""},
         {"start_1", "cycles"},
         {"issued_0", "cycles"},
         {"done_0", "cycles"},
         {"issued_1", "cycles"},
         {"done_1", "cycles"}});
  table("wgmma_share",
        "endless streams of wgmma m64n128k16 from 1 to 3 warpgroups: cycles per instruction of each group",
        {{"warpgroups", ""}, {"group", ""}, {"cycles_per_instr", "cycles"}});
  measure_turns<4>(phases);
  measure_turns<8>(phases);
  measure_turns<16>(phases);
  measure_arrival<4>(out);
  measure_arrival<8>(out);
  measure_arrival<16>(out);
  allow_smem(share_kernel, kSmem);
  for (int groups = 1; groups <= 3; ++groups) {
    constexpr int kWindow = 2000000;
    share_kernel<<<1, 128 * groups, kSmem>>>(kWindow, out.data, nullptr);
    sync_and_check();
    auto host = out.read();
    for (int g = 0; g < groups; ++g)
      Row("wgmma_share")("warpgroups", groups)("group", g)("cycles_per_instr", double(kWindow) / host[g]);
  }
  finish();
}
