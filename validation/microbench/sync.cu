// Synchronisation inside an SM and a cluster: mbarriers, named barriers, setmaxnreg, cluster barrier, distributed
// shared memory.
#include "common.cuh"

constexpr int kRounds = 1000;

// One warp (lane 0 acts) arrives kRounds times; no phase completes.
__global__ void arrive_kernel(uint32_t* out) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) mbar_init(&bar, 1 << 19);
  __syncthreads();
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 8
  for (int i = 0; i < kRounds; ++i)
    if (threadIdx.x == 0) mbar_arrive(&bar);
  out[0] = clock32() - start;
  meter.stop();
}

// A try_wait on a phase that is already complete.
__global__ void success_kernel(uint32_t* out) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    mbar_init(&bar, 1);
    mbar_arrive(&bar);
  }
  __syncthreads();
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 1
  for (int i = 0; i < kRounds; ++i) mbar_wait(&bar, 0);
  out[0] = clock32() - start;
  meter.stop();
}

// Cycles a try_wait on an incomplete phase suspends the thread before it returns false.
__global__ void failure_kernel(uint32_t* out) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) mbar_init(&bar, 1);
  __syncthreads();
  Meter meter;
  uint32_t start = clock32(), tries = 0;
  while (tries < 20 && !mbar_try(&bar, 0)) ++tries;
  out[0] = (clock32() - start) / tries;
  meter.stop();
}

// One side stamps and arrives, every thread of the other waits and stamps: cycles from arrive to resume.
__global__ void resume_kernel(uint32_t* out) {
  __shared__ uint64_t bar;
  __shared__ uint32_t sent;
  if (threadIdx.x == 0) mbar_init(&bar, 1);
  int side = threadIdx.x / (blockDim.x / 2);
  Meter meter;
  for (int i = 0; i < 4; ++i) {  // the first rounds fill the instruction cache
    __syncthreads();
    if (side == 0) {
      for (uint32_t start = clock32(); clock32() - start < 500;) {
      }
      if (threadIdx.x == 0) {
        sent = clock32();
        mbar_arrive(&bar);
      }
    } else {
      mbar_wait(&bar, i & 1);
      uint32_t received = clock32();
      if (threadIdx.x == blockDim.x / 2) out[0] = received - sent;
    }
  }
  meter.stop();
}

// Two warps (or two groups whose every thread waits and whose lane 0 arrives) hand a token to and fro.
__global__ void handoff_kernel(uint32_t* out) {
  __shared__ uint64_t bars[2];
  if (threadIdx.x < 2) mbar_init(&bars[threadIdx.x], 1);
  __syncthreads();
  int side = threadIdx.x / (blockDim.x / 2);
  bool leader = threadIdx.x % (blockDim.x / 2) == 0;
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 1
  for (int i = 0; i < kRounds; ++i) {
    if (side == 1) mbar_wait(&bars[0], i & 1);
    if (side == 0) {
      if (leader) mbar_arrive(&bars[0]);
      mbar_wait(&bars[1], i & 1);
    } else if (leader) {
      mbar_arrive(&bars[1]);
    }
  }
  if (threadIdx.x == 0) out[0] = clock32() - start;
  meter.stop();
}

__global__ void __launch_bounds__(1024) bar_sync_kernel(int threads, uint32_t* out) {
  __syncthreads();
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 1
  for (int i = 0; i < kRounds; ++i) bar_sync(1, threads);
  if (threadIdx.x == 0) out[0] = clock32() - start;
  meter.stop();
}

// Two groups of `threads` pass the turn by named barriers, as in FlashAttention-3's ping-pong.
__global__ void __launch_bounds__(1024) bar_turn_kernel(int threads, uint32_t* out) {
  int group = threadIdx.x / threads, both = 2 * threads;
  if (group == 1) bar_arrive(1, both);
  __syncthreads();
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 1
  for (int i = 0; i < kRounds; ++i) {
    bar_sync(1 + group, both);
    if (!(group == 1 && i == kRounds - 1)) bar_arrive(2 - group, both);
  }
  if (threadIdx.x == 0) out[0] = clock32() - start;
  meter.stop();
}

// Warpgroup 0 releases registers, the others take them: FlashAttention-3's split (240, 24) of three groups of 168.
__global__ void __launch_bounds__(384, 1) registers_kernel(uint32_t delay, uint32_t* out) {
  int group = threadIdx.x / 128;
  __syncthreads();
  Meter meter;
  uint32_t start = clock32();
  if (group == 0) {
    while (clock32() - start < delay) {
    }
    start = clock32();
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;" ::: "memory");
    uint32_t stop = clock32();
    if (threadIdx.x == 0) out[0] = stop - start;
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;" ::: "memory");
    uint32_t stop = clock32();
    if (threadIdx.x % 128 == 0) out[group] = stop - start;
  }
  meter.stop();
}

__global__ void cluster_barrier_kernel(uint32_t* out) {
  Meter meter;
  uint32_t start = clock32();
#pragma unroll 1
  for (int i = 0; i < kRounds; ++i)
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = clock32() - start;
  meter.stop();
}

// Dependent loads from the other CTA's shared memory.
__global__ void __cluster_dims__(2, 1, 1) dsmem_kernel(uint32_t* out) {
  __shared__ uint32_t word;
  uint32_t rank, remote;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_u32(&word)), "r"(rank ^ 1));
  // The word in the other CTA holds its own cluster address, as seen from here.
  asm volatile("st.shared::cluster.u32 [%0], %0;" ::"r"(remote) : "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  Meter meter;
  uint32_t start = clock32();
  uint32_t address = remote;
#pragma unroll 1
  for (int i = 0; i < kRounds; ++i) asm volatile("ld.volatile.shared::cluster.u32 %0, [%0];" : "+r"(address)::"memory");
  uint32_t stop = clock32();
  if (blockIdx.x == 0) {
    out[0] = stop - start;
    out[1] = address;
  }
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  meter.stop();
}

int main() {
  warm_up();
  Buffer<uint32_t> out(8);
  auto cycles = [&](auto launch, int index = 0) {
    return median_of(9, [&] {
      launch();
      sync_and_check();
      return double(out.read()[index]);
    });
  };
  table("mbarrier",
        "mbarrier in shared memory: cost of one operation, time from arrive to the waiter, and half a round trip "
        "(hand-off: wait, "
        "arrive) between two groups of threads",
        {{"what", ""}, {"threads_per_side", ""}, {"cycles", "cycles"}});
  Row("mbarrier")("what", "arrive")("threads_per_side", 1)(
      "cycles", cycles([&] { arrive_kernel<<<1, 32>>>(out.data); }) / kRounds);
  Row("mbarrier")("what", "try_wait success")("threads_per_side", 32)(
      "cycles", cycles([&] { success_kernel<<<1, 32>>>(out.data); }) / kRounds);
  Row("mbarrier")("what", "try_wait failure")("threads_per_side", 32)(
      "cycles", cycles([&] { failure_kernel<<<1, 32>>>(out.data); }));
  for (int threads : {32, 128, 256})
    Row("mbarrier")("what", "arrive to resume")("threads_per_side", threads)(
        "cycles", cycles([&] { resume_kernel<<<1, 2 * threads>>>(out.data); }));
  for (int threads : {32, 128, 256})
    Row("mbarrier")("what", "hand-off")("threads_per_side", threads)(
        "cycles", cycles([&] { handoff_kernel<<<1, 2 * threads>>>(out.data); }) / (2 * kRounds));

  table("named_barrier",
        "bar.sync of all threads, and one-way turn between two groups (bar.sync own, bar.arrive other)",
        {{"what", ""}, {"threads", ""}, {"cycles", "cycles"}});
  for (int threads : {32, 64, 128, 256, 384, 512, 768, 1024})
    Row("named_barrier")("what", "sync")("threads", threads)(
        "cycles", cycles([&] { bar_sync_kernel<<<1, threads>>>(threads, out.data); }) / kRounds);
  for (int threads : {32, 64, 128, 256, 384})
    Row("named_barrier")("what", "turn")("threads", threads)(
        "cycles", cycles([&] { bar_turn_kernel<<<1, 2 * threads>>>(threads, out.data); }) / (2 * kRounds));

  table("setmaxnreg", "warpgroup 0 decreases to 24 registers `delay` cycles after the two others ask for 240",
        {{"delay", "cycles"}, {"dec", "cycles"}, {"inc_1", "cycles"}, {"inc_2", "cycles"}});
  for (int delay : {0, 500, 2000}) {
    auto at = [&](int index) { return cycles([&] { registers_kernel<<<1, 384>>>(delay, out.data); }, index); };
    Row("setmaxnreg")("delay", delay)("dec", at(0))("inc_1", at(1))("inc_2", at(2));
  }

  table("cluster",
        "cluster barrier (arrive and wait, all threads) and dependent load from the other CTA's shared memory",
        {{"what", ""}, {"ctas", ""}, {"threads", ""}, {"cycles", "cycles"}});
  for (int ctas : {2, 4})
    for (int threads : {128, 384}) {
      cudaLaunchConfig_t config{};
      config.gridDim = ctas;
      config.blockDim = threads;
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {unsigned(ctas), 1, 1};
      config.attrs = &attribute;
      config.numAttrs = 1;
      double barrier = cycles([&] { CHECK(cudaLaunchKernelEx(&config, cluster_barrier_kernel, out.data)); });
      Row("cluster")("what", "barrier")("ctas", ctas)("threads", threads)("cycles", barrier / kRounds);
    }
  Row("cluster")("what", "dsmem load")("ctas", 2)("threads", 1)(
      "cycles", cycles([&] { dsmem_kernel<<<2, 1>>>(out.data); }) / kRounds);
  finish();
}
