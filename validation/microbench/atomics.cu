// Reduce-add into L2: red.global and cp.reduce.async.bulk, all SMs, tiles private or shared by several CTAs.
#include <cuda_fp16.h>

#include "common.cuh"

constexpr int kTileBytes = 16384;
constexpr int kSmem = kTileBytes;

enum class Add { kF32, kV4F32, kV2Bf16, kBulkF32, kBulkBf16, kBulkF16, kStoreV4, kBulkStore };
const char* add_name(Add add) {
  static const char* names[] = {"red.f32",          "red.v4.f32",      "red.bf16x2",     "bulk reduce f32",
                                "bulk reduce bf16", "bulk reduce f16", "st.v4 (no add)", "bulk store (no add)"};
  return names[int(add)];
}
int add_bytes(Add add) { return add == Add::kV2Bf16 || add == Add::kBulkBf16 || add == Add::kBulkF16 ? 2 : 4; }

// Every CTA adds `rounds` tiles of 16 KB; `tiles` private tiles per CTA, each shared by `sharers` CTAs.
template <Add kAdd>
__global__ void __launch_bounds__(256) add_kernel(char* data, int tiles, int sharers, int rounds, uint64_t* out) {
  extern __shared__ __align__(128) char smem[];
  for (int i = threadIdx.x; i < kTileBytes / 4; i += blockDim.x) reinterpret_cast<float*>(smem)[i] = 0.f;
  fence_async();
  __syncthreads();
  char* base = data + size_t(blockIdx.x / sharers) * tiles * kTileBytes;
  Meter meter;
  uint64_t ns = global_ns(), cycles = cycles64();
  for (int round = 0; round < rounds; ++round) {
    char* tile = base + size_t(round % tiles) * kTileBytes;
    if constexpr (kAdd == Add::kBulkF32 || kAdd == Add::kBulkBf16 || kAdd == Add::kBulkF16 || kAdd == Add::kBulkStore) {
      if (threadIdx.x == 0) {
        if constexpr (kAdd == Add::kBulkF32)
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(tile),
                       "r"(smem_u32(smem)), "r"(kTileBytes)
                       : "memory");
        else if constexpr (kAdd == Add::kBulkBf16)
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(tile),
                       "r"(smem_u32(smem)), "r"(kTileBytes)
                       : "memory");
        else if constexpr (kAdd == Add::kBulkF16)
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(tile),
                       "r"(smem_u32(smem)), "r"(kTileBytes)
                       : "memory");
        else
          bulk_store(tile, smem, kTileBytes);
        bulk_commit();
        bulk_wait<3>();
      }
    } else {
      constexpr int kBytes = kAdd == Add::kV4F32 || kAdd == Add::kStoreV4 ? 16 : 4;
#pragma unroll 4
      for (int at = threadIdx.x * kBytes; at < kTileBytes; at += 256 * kBytes) {
        if constexpr (kAdd == Add::kF32)
          asm volatile("red.global.add.f32 [%0], %1;" ::"l"(tile + at), "f"(0.f) : "memory");
        if constexpr (kAdd == Add::kV4F32)
          asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(tile + at), "f"(0.f) : "memory");
        if constexpr (kAdd == Add::kV2Bf16)
          asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(tile + at), "r"(0) : "memory");
        if constexpr (kAdd == Add::kStoreV4)
          asm volatile("st.global.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(tile + at), "f"(0.f) : "memory");
      }
    }
  }
  bulk_wait<0>();
  __threadfence();
  __syncthreads();
  meter.stop();
  if (threadIdx.x == 0) {
    out[3 * blockIdx.x] = ns;
    out[3 * blockIdx.x + 1] = global_ns();
    out[3 * blockIdx.x + 2] = cycles64() - cycles;
  }
}

template <Add kAdd>
void measure(int sms, Buffer<char>& data, Buffer<uint64_t>& out) {
  constexpr int kTiles = 4, kRounds = 200;
  for (int ctas : {1, sms})
    for (int sharers : {1, 2, 4, 8}) {
      if (ctas == 1 && sharers > 1) continue;
      std::vector<double> per_second, per_cycle;
      for (int launch = 0; launch < 5; ++launch) {
        add_kernel<kAdd><<<ctas, 256, kSmem>>>(data.data, kTiles, sharers, kRounds, out.data);
        sync_and_check();
        if (launch == 0) continue;
        auto host = out.read();
        uint64_t first = ~0ull, last = 0;
        double cycles = 0;
        for (int b = 0; b < ctas; ++b) {
          first = std::min(first, host[3 * b]);
          last = std::max(last, host[3 * b + 1]);
          cycles += double(host[3 * b + 2]) / ctas;
        }
        double bytes = double(ctas) * kRounds * kTileBytes;
        per_second.push_back(bytes / double(last - first));
        per_cycle.push_back(bytes / cycles);
      }
      Row("reduce_add")("op", add_name(kAdd))("ctas", ctas)("sharers", sharers)("chip", median(per_cycle))(
          "throughput", median(per_second))("adds", median(per_second) / add_bytes(kAdd));
    }
}

int main() {
  warm_up();
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  Buffer<char> data(size_t(sms) * 4 * kTileBytes);
  Buffer<uint64_t> out(3 * size_t(sms));
  table(
      "reduce_add", "CTAs add tiles of 16 KB into 4 tiles each (L2-resident), a tile shared by `sharers` CTAs",
      {{"op", ""}, {"ctas", ""}, {"sharers", ""}, {"chip", "bytes/cycle"}, {"throughput", "GB/s"}, {"adds", "Gop/s"}});
  measure<Add::kF32>(sms, data, out);
  measure<Add::kV4F32>(sms, data, out);
  measure<Add::kV2Bf16>(sms, data, out);
  measure<Add::kBulkF32>(sms, data, out);
  measure<Add::kBulkBf16>(sms, data, out);
  measure<Add::kBulkF16>(sms, data, out);
  measure<Add::kStoreV4>(sms, data, out);
  measure<Add::kBulkStore>(sms, data, out);
  finish();
}
