// The inner part of FlashAttention-2 without its memory traffic, on one SM: four or eight warps (one or two on a
// sub-core) that each own 32 query rows repeat QK, softmax and PV from registers, with parts of it left out.
//
//   for parts in 1 3 9 14 15 17 31 63; do
//     nvcc -arch=sm_90 -fmad=false -DPARTS=$parts -DHEAD_DIM=128 -DKEYS=64 -o core validation/fa2_core.cu && ./core
//   done
//
// and the same with -DHEAD_DIM=64 -DKEYS=128. Prints lines of validation/data/h200_fa2_core.csv up to `cycles`; the
// instruction counts are those of the loop in `cuobjdump -sass core`. Without fused multiply and add and with exp2f as
// it is, the softmax has the instructions of PyTorch's build.
#include <cstdint>
#include <cstdio>

enum Part { kMma = 1, kRowMax = 2, kRescale = 4, kExp = 8, kLdmatrix = 16, kSync = 32 };
constexpr int kN = KEYS / 8, kD = HEAD_DIM / 8;  // 8-wide blocks of S and of O
constexpr int kIterations = 9999, kSmem = 81920;

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void sync_four_warps() {
  if (PARTS & kSync) asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128));
}

// Rows 0 .. 3 of a thread: accumulator block i / 2, its half i % 2.
__global__ void core(long long* cycles, float* sink) {
  extern __shared__ uint32_t smem[];  // whatever it holds
  uint32_t base = uint32_t(__cvta_generic_to_shared(smem)) + threadIdx.x % 32 * 16;
  uint32_t q[2][4], b[4][4], p[2][kN][2];
  float o[2][kD][4], s[2][kN][4], scale[4], high[4], sum[4];
  for (int i = 0; i < 2; ++i) ldmatrix(q[i], base + 9216 + 4096 * i);
  for (int i = 0; i < 4; ++i) {
    ldmatrix(b[i], base + 512 * i);
    high[i] = scale[i] = sum[i] = 0.f;
  }
  for (int i = 0; i < 8 * kN; ++i) s[i / 4 / kN][i / 4 % kN][i % 4] = float(i);
  for (int i = 0; i < 8 * kD; ++i) o[i / 4 / kD][i / 4 % kD][i % 4] = float(i);
  float log2e = *sink;
  long long start = clock64();
#pragma unroll 1
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    sync_four_warps();
    if (PARTS & kMma) {
#pragma unroll
      for (int i = 0; i < 8 * kN; ++i) s[i / 4 / kN][i / 4 % kN][i % 4] = 0.f;
#pragma unroll
      for (int k = 0; k < kD / 2; ++k) {
        if (PARTS & kLdmatrix)
          for (int i = 0; i < 2; ++i) ldmatrix(q[i], base + k * 1024 + 512 * i);
#pragma unroll
        for (int j = 0; j < kN / 2; ++j) {
          if (PARTS & kLdmatrix) ldmatrix(b[j % 4], base + 8192 + (k * kN / 2 + j) * 512);
#pragma unroll
          for (int i = 0; i < 4; ++i) mma(s[i % 2][2 * j + i / 2], q[i % 2], b[j % 4] + i / 2 * 2);
        }
      }
    }
    sync_four_warps();
    if (PARTS & kRowMax) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float top = high[i];
        for (int j = 0; j < 2 * kN; ++j) top = fmaxf(top, s[i / 2][j / 2][i % 2 * 2 + j % 2]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        scale[i] = exp2f((high[i] - top) * log2e);
        high[i] = top;
        sum[i] *= scale[i];
      }
    }
    if (PARTS & kRescale) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2 * kD; ++j) o[i / 2][j / 2][i % 2 * 2 + j % 2] *= scale[i];
    }
    if (PARTS & kExp) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float shift = high[i] * log2e, row = 0.f;
        for (int j = 0; j < 2 * kN; ++j) {
          float& x = s[i / 2][j / 2][i % 2 * 2 + j % 2];
          x = exp2f(x * log2e - shift);
        }
        for (int j = 0; j < 2 * kN; ++j) row += s[i / 2][j / 2][i % 2 * 2 + j % 2];
        sum[i] += row;
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kN; ++i) {
      float* x = s[i / 2 / kN][i / 2 % kN] + i % 2 * 2;
      asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p[i / 2 / kN][i / 2 % kN][i % 2]) : "f"(x[1]), "f"(x[0]));
    }
    if (PARTS & kMma) {
#pragma unroll
      for (int k = 0; k < kN / 2; ++k)
#pragma unroll
        for (int j = 0; j < kD / 2; ++j) {
          if (PARTS & kLdmatrix) ldmatrix(b[j % 4], base + 40960 + (k * kD / 2 + j) * 512);
#pragma unroll
          for (int i = 0; i < 4; ++i) mma(o[i % 2][2 * j + i / 2], p[i % 2][2 * k], b[j % 4] + i / 2 * 2);
        }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) s[0][i / 4][i % 4] = float(p[i / 2 / kN][i / 2 % kN][i % 2]);
    }
  }
  *cycles = clock64() - start;
  for (int i = 0; i < 4; ++i) log2e += sum[i] + scale[i];
  for (int i = 0; i < 8 * kD; ++i) log2e += o[i / 4 / kD][i / 4 % kD][i % 4];
  for (int i = 0; i < 8 * kN; ++i) log2e += s[i / 4 / kN][i / 4 % kN][i % 4];
  sink[threadIdx.x + 1] = log2e;
}

int main() {
  long long* cycles;
  float* sink;
  cudaMalloc(&cycles, sizeof *cycles);
  cudaMalloc(&sink, 2048);
  cudaMemset(sink, 0, 2048);
  cudaFuncSetAttribute(core, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  for (int warps = 1; warps <= 2; ++warps) {
    long long total = 0;
    for (int run = 0; run < 2; ++run) core<<<1, 128 * warps, kSmem>>>(cycles, sink);  // the first fills caches
    cudaMemcpy(&total, cycles, sizeof total, cudaMemcpyDeviceToHost);
    std::printf("%d,%d,%d,%.1f\n", HEAD_DIM, PARTS, warps, double(total) / kIterations);
  }
  return cudaGetLastError() != cudaSuccess;
}
