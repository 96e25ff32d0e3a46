// An endless stream of wgmma m64nNk16 (FP8: k32) from one warpgroup, counted in the common window.
#pragma once

#include "corun.cuh"
#include "wgmma.cuh"

constexpr int kMmaSmemA = 8192, kMmaSmem = kMmaSmemA + 32768;  // A: 64 rows of 128 bytes; B: up to 256 rows

// Groups of 16 instructions (the four k-steps of a 64-wide tile, again and again), the queue always full; operands are
// in `smem`. Counted every fourth group only, so that the bookkeeping, which competes with the vector work for the
// pipes, hides under the instructions in flight.
//
// All warps must issue the same number of wgmma, so they cannot each end by their own clock: the first one announces
// the last iteration four iterations ahead, in `last`, a word of this warpgroup that holds kNever at the start.
constexpr uint32_t kNever = ~0u;
template <int N, bool kRs, bool kFp8 = false>
__device__ __forceinline__ Count mma_window(uint32_t origin, const char* smem, volatile uint32_t* last, float* sink) {
  uint64_t a = wgmma_descriptor(smem_u32(smem)), b = wgmma_descriptor(smem_u32(smem + kMmaSmemA));
  uint32_t regs[4];
  for (int i = 0; i < 4; ++i) regs[i] = reinterpret_cast<const uint32_t*>(smem)[threadIdx.x % 128 * 4 + i];
  float d[N / 2] = {};
  Window window(origin);
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    uint32_t announced = *last;
#pragma unroll 1
    for (int group = 0; group < 4; ++group) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        if constexpr (kRs)
          Wgmma<N, kFp8>::rs(d, regs, b + 2 * (k % 4));
        else
          Wgmma<N, kFp8>::ss(d, a + 2 * (k % 4), b + 2 * (k % 4));
      }
      wgmma_commit();
      wgmma_wait<1>();
    }
    window.tick(64);
    if (threadIdx.x % 128 == 0 && announced == kNever && window.over()) *last = i + 4;
    if (i == announced) break;
  }
  wgmma_wait<0>();
  if (sink != nullptr)
    for (int i = 0; i < N / 2; ++i) sink[i * 128 + threadIdx.x] = d[i];
  return window.count;
}

// The same at partial duty: bursts of kBurst instructions, waited for, with idle hops in between.
template <int N, bool kRs, int kBurst, bool kFp8 = false>
__device__ __forceinline__ Count mma_bursts(uint32_t origin, int hops, const char* smem, volatile uint32_t* last,
                                            float* sink) {
  uint64_t a = wgmma_descriptor(smem_u32(smem)), b = wgmma_descriptor(smem_u32(smem + kMmaSmemA));
  uint32_t regs[4];
  for (int i = 0; i < 4; ++i) regs[i] = reinterpret_cast<const uint32_t*>(smem)[threadIdx.x % 128 * 4 + i];
  float d[N / 2] = {};
  Idle idle;
  Window window(origin);
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    uint32_t announced = *last;
#pragma unroll 1
    for (int burst = 0; burst < 8; ++burst) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kBurst; ++k) {
        if constexpr (kRs)
          Wgmma<N, kFp8>::rs(d, regs, b + 2 * (k % 4));
        else
          Wgmma<N, kFp8>::ss(d, a + 2 * (k % 4), b + 2 * (k % 4));
      }
      wgmma_commit();
      wgmma_wait<0>();
      idle(hops);
    }
    window.tick(8 * kBurst);
    if (threadIdx.x % 128 == 0 && announced == kNever && window.over()) *last = i + 4;
    if (i == announced) break;
  }
  idle.keep(sink);
  if (sink != nullptr)
    for (int i = 0; i < N / 2; ++i) sink[i * 128 + threadIdx.x] = d[i];
  return window.count;
}
