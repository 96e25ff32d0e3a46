// Measuring two kinds of work beside each other on one SM: a common window of time, and the vector side.
#pragma once

#include "vector_ops.cuh"

constexpr uint32_t kWarmup = 40000, kWindow = 400000, kCooldown = 40000;  // cycles

struct Count {
  uint32_t instr, cycles;
};

// Counts what is issued inside the window. The load stays on before and after it, so that every group is measured
// beside running neighbours.
class Window {
 public:
  __device__ explicit Window(uint32_t origin) : origin_(origin), start_(origin) {}
  // `issued` more instructions have been issued.
  __device__ __forceinline__ void tick(int issued) {
    uint32_t now = clock32();
    time_ = now - origin_;
    if (time_ < kWarmup) {
      start_ = now;
    } else if (time_ < kWarmup + kWindow) {
      count.instr += issued;
      count.cycles = now - start_;
    }
  }
  __device__ bool over() const { return time_ >= kWarmup + kWindow + kCooldown; }

  Count count{};

 private:
  uint32_t origin_, start_, time_ = 0;
};

// Repeats `body`, which returns the instructions it issued, until the window is over.
template <typename Body>
__device__ __forceinline__ Count windowed(uint32_t origin, Body body) {
  Window window(origin);
  while (!window.over()) window.tick(body());
  return window.count;
}

// The vector side: an endless stream over kChains dependent chains (hops < 0), or bursts of 64 instructions with `hops`
// idle hops between them.
template <Op kOp, int kChains = kStreams>
__device__ __forceinline__ Count vector_window(uint32_t origin, int hops, float* sink) {
  VectorState state(1.f);
  Idle idle;
  Count count;
  if (hops < 0) {
    count = windowed(origin, [&] {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) vector_burst<kOp, 256, kChains>(state);
      return 1024;
    });
  } else {
    count = windowed(origin, [&] {
      vector_burst<kOp, 64, kChains>(state);
      idle(hops);
      return 64;
    });
  }
  state.keep(sink);
  idle.keep(sink);
  return count;
}

// A common time zero for all warps of the CTA.
__device__ __forceinline__ uint32_t common_origin() {
  __shared__ uint32_t origin;
  if (threadIdx.x == 0) origin = clock32();
  __syncthreads();
  return origin;
}

struct Result {
  double mma_interval, vector_lanes;  // cycles per MMA instruction; vector lanes (elements) per cycle and SM
};

// Median over launches; of the `groups` counts the first `mma_groups` belong to the tensor core.
template <typename Launch>
Result measure_window(const Buffer<Count>& out, int mma_groups, int groups, Launch launch) {
  std::vector<double> mma, vector;
  for (int repeat = 0; repeat < 4; ++repeat) {
    launch();
    sync_and_check();
    if (repeat == 0) continue;
    auto host = out.read();
    double mma_rate = 0, vector_rate = 0;
    for (int g = 0; g < groups; ++g)
      (g < mma_groups ? mma_rate : vector_rate) += double(host[g].instr) / host[g].cycles;
    mma.push_back(mma_rate > 0 ? 1 / mma_rate : 0);
    vector.push_back(vector_rate * 128);
  }
  return {median(mma), median(vector)};
}

// Cycles by which one vector instruction of a warp delays the tensor core, from the loss of MMA throughput.
inline double delay_per_instr(const Result& together, double mma_alone) {
  if (together.vector_lanes == 0 || together.mma_interval == 0) return 0;
  double warp_instr_per_sub_core = together.vector_lanes / 128;  // per cycle
  return (1 - mma_alone / together.mma_interval) / warp_instr_per_sub_core;
}
