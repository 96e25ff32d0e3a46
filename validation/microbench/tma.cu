// The TMA unit: latency of one copy by size (warm in L2, cold from HBM), issue interval, multicast in a cluster of two,
// and a store after the proxy fence. Copies are cp.async.bulk ("bulk") or a 2D tensor map with 128-byte swizzle
// ("tensor").
#include <cudaTypedefs.h>

#include "common.cuh"

constexpr int kRing = 65536;
constexpr int kSmem = kRing + 1024;  // the ring is aligned to 1024 bytes, as swizzled boxes must be
constexpr size_t kColdBytes = size_t(4) << 30;

__device__ __forceinline__ char* aligned_ring(char* smem) { return smem + (1024 - smem_u32(smem) % 1024) % 1024; }

__device__ __forceinline__ void tensor_load(void* smem, const CUtensorMap* map, int row, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(smem_u32(smem)),
      "l"(map), "r"(smem_u32(bar)), "r"(0), "r"(row)
      : "memory");
}
__device__ __forceinline__ void bulk_load_multicast(void* smem, const void* global, uint32_t bytes, uint64_t* bar,
                                                    uint16_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(smem_u32(smem)),
      "l"(global), "r"(bytes), "r"(smem_u32(bar)), "h"(mask)
      : "memory");
}

// Map over rows of 128 bytes (64 bf16), box of `bytes` / 128 rows.
CUtensorMap make_map(void* global, size_t total_bytes, int bytes) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  CUtensorMap map;
  cuuint64_t dims[2] = {64, total_bytes / 128};
  cuuint64_t strides[1] = {128};
  cuuint32_t box[2] = {64, cuuint32_t(bytes / 128)};
  cuuint32_t steps[2] = {1, 1};
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, global, dims, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled failed\n");
    std::exit(1);
  }
  return map;
}

// `count` copies one after the other, `stride` bytes apart: cycles from arming the barrier to the successful wait.
template <bool kTensor>
__global__ void latency_kernel(const __grid_constant__ CUtensorMap map, const char* global, int bytes, size_t stride,
                               int count, uint32_t* out) {
  extern __shared__ char smem[];
  __shared__ uint64_t bar;
  char* ring = aligned_ring(smem);
  if (elect_one()) mbar_init(&bar, 1);
  mbar_fence_init();
  __syncwarp();
  Meter meter;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    uint32_t start = clock32();
    if (elect_one()) {
      mbar_expect(&bar, bytes);
      if constexpr (kTensor)
        tensor_load(ring, &map, int(i * stride / 128), &bar);
      else
        bulk_load(ring, global + i * stride, bytes, &bar);
    }
    mbar_wait(&bar, i & 1);
    uint32_t cycles = clock32() - start;
    if (threadIdx.x == 0) out[i] = cycles;
  }
  meter.stop();
}

// `count` copies without waiting between them: cycles to issue them all, and until all have arrived.
template <bool kTensor>
__global__ void issue_kernel(const __grid_constant__ CUtensorMap map, const char* global, int bytes, int count,
                             uint32_t* out) {
  extern __shared__ char smem[];
  __shared__ uint64_t bar;
  char* ring = aligned_ring(smem);
  if (elect_one()) mbar_init(&bar, 1);
  mbar_fence_init();
  __syncwarp();
  Meter meter;
#pragma unroll 1
  for (int repeat = 0; repeat < 2; ++repeat) {  // the first pass warms L2 and the instruction cache
    __syncwarp();
    uint32_t start = clock32();
    if (elect_one()) {
      mbar_expect(&bar, bytes * count);
      const char* source = global;
      int offset = 0, row = 0;
#pragma unroll 1
      for (int i = 0; i < count; i += 4)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kTensor)
            tensor_load(ring + offset, &map, row, &bar);
          else
            bulk_load(ring + offset, source, bytes, &bar);
          offset = (offset + bytes) & (kRing - 1);
          source += bytes;
          row += bytes / 128;
        }
    }
    __syncwarp();
    uint32_t issued = clock32();
    mbar_wait(&bar, repeat);
    uint32_t done = clock32();
    if (threadIdx.x == 0) {
      out[0] = issued - start;
      out[1] = done - start;
    }
  }
  meter.stop();
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// Cluster of two. mode 0: each CTA loads `bytes` for itself; 1: CTA 0 loads `bytes` for both by multicast;
// 2: each CTA loads its half and sends it to both. Cycles until the CTA has its `bytes`.
__global__ void __cluster_dims__(2, 1, 1)
    multicast_kernel(int mode, const char* global, int bytes, int count, uint32_t* out) {
  extern __shared__ char smem[];
  __shared__ uint64_t bar;
  char* ring = aligned_ring(smem);
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) mbar_init(&bar, 1);
  mbar_fence_init();
  Meter meter;
  for (int i = 0; i < count; ++i) {
    cluster_sync();
    if (elect_one()) mbar_expect(&bar, bytes);
    __syncwarp();
    cluster_sync();
    const char* source = global + size_t(i % 16) * 65536;
    uint32_t start = clock32();
    if (elect_one()) {
      if (mode == 0) bulk_load(ring, source, bytes, &bar);
      if (mode == 1 && rank == 0) bulk_load_multicast(ring, source, bytes, &bar, 3);
      if (mode == 2) bulk_load_multicast(ring + rank * bytes / 2, source + rank * bytes / 2, bytes / 2, &bar, 3);
    }
    mbar_wait(&bar, i & 1);
    uint32_t cycles = clock32() - start;
    if (threadIdx.x == 0) out[rank * count + i] = cycles;
  }
  cluster_sync();
  meter.stop();
}

// 128 threads write `bytes` to shared memory, fence, sync; one thread stores them by bulk copy.
// out: proxy fence, sync, issue and commit, wait until read, wait until written; cycles.
__global__ void store_kernel(char* global, int bytes, uint32_t* out) {
  extern __shared__ __align__(128) char smem[];
  Meter meter;
  for (int repeat = 0; repeat < 8; ++repeat) {
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
      *reinterpret_cast<uint4*>(smem + i) = make_uint4(i, repeat, i, repeat);
    uint32_t t0 = clock32();
    fence_async();
    uint32_t t1 = clock32();
    __syncthreads();
    uint32_t t2 = clock32();
    if (threadIdx.x == 0) {
      bulk_store(global, smem, bytes);
      bulk_commit();
      uint32_t t3 = clock32();
      bulk_wait_read<0>();
      uint32_t t4 = clock32();
      bulk_wait<0>();
      uint32_t t5 = clock32();
      uint32_t values[5] = {t1 - t0, t2 - t1, t3 - t2, t4 - t2, t5 - t2};
      for (int v = 0; v < 5; ++v) out[repeat * 5 + v] = values[v];
    }
    __syncthreads();
  }
  meter.stop();
}

template <bool kTensor>
void measure_latency(Buffer<char>& global, Buffer<uint32_t>& out) {
  auto kernel = latency_kernel<kTensor>;
  allow_smem(kernel, kSmem);
  constexpr int kCount = 64;
  // The first 64 MB serve the warm copies; each kind of copy then has its own untouched part.
  size_t cold_offset = size_t(kTensor ? 1536 : 64) << 20;
  for (int bytes : {512, 1024, 2048, 4096, 8192, 16384, 32768}) {
    CUtensorMap warm_map = make_map(global.data, kColdBytes, bytes);
    std::vector<double> warm, cold;
    for (int launch = 0; launch < 4; ++launch) {
      kernel<<<1, 32, kSmem>>>(warm_map, global.data, bytes, 32768, kCount, out.data);
      sync_and_check();
      if (launch == 0) continue;
      auto host = out.read();
      for (int i = 0; i < kCount; ++i) warm.push_back(host[i]);
    }
    for (int launch = 0; launch < 3; ++launch) {
      // Copies lie 1 MB apart in a region of the buffer that no copy has touched before.
      char* fresh = global.data + cold_offset;
      CUtensorMap map = make_map(fresh, kColdBytes - cold_offset, bytes);
      kernel<<<1, 32, kSmem>>>(map, fresh, bytes, size_t(1) << 20, kCount, out.data);
      sync_and_check();
      cold_offset += (size_t(kCount) << 20);
      auto host = out.read();
      for (int i = 8; i < kCount; ++i) cold.push_back(host[i]);
    }
    const char* kind = kTensor ? "tensor" : "bulk";
    Row("tma_latency")("copy", kind)("bytes", bytes)("from", "l2")("cycles", median(warm))("p10", quantile(warm, 0.1))(
        "p90", quantile(warm, 0.9));
    Row("tma_latency")("copy", kind)("bytes", bytes)("from", "hbm")("cycles", median(cold))("p10", quantile(cold, 0.1))(
        "p90", quantile(cold, 0.9));
  }
}

// Reads `bytes` from `global`, so that L2 holds them and nothing that HBM has yet to take.
__global__ void read_kernel(const uint4* global, size_t bytes, uint32_t* out) {
  uint32_t sum = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < bytes / 16; i += gridDim.x * blockDim.x)
    sum += global[i].x;
  if (sum == 1) out[0] = sum;
}

// Copies of 16 KiB, one after the other through memory as tiles of K and V are: from L2, and from HBM.
void measure_miss(Buffer<char>& global, Buffer<uint32_t>& out) {
  constexpr int kBytes = 16384, kCount = 256;
  auto kernel = latency_kernel<true>;
  char* fresh = global.data + (size_t(2560) << 20);  // a part of the buffer that no copy has touched before
  std::vector<double> cycles[2];
  for (int launch = 0; launch < 4; ++launch) {
    read_kernel<<<132, 512>>>(reinterpret_cast<const uint4*>(global.data), size_t(256) << 20, out.data);
    for (bool miss : {true, false}) {
      CUtensorMap map = make_map(fresh, size_t(kCount) * kBytes, kBytes);
      kernel<<<1, 32, kSmem>>>(map, fresh, kBytes, kBytes, kCount, out.data);
      sync_and_check();
      auto host = out.read();
      cycles[miss].insert(cycles[miss].end(), host.begin() + 8, host.begin() + kCount);
    }
    fresh += kCount * kBytes;
  }
  for (bool miss : {false, true})
    for (int tenth = 0; tenth < 10; ++tenth)
      Row("tma_miss")("bytes", kBytes)("from", miss ? "hbm" : "l2")("quantile", 0.1 * tenth + 0.05)(
          "cycles", quantile(cycles[miss], 0.1 * tenth + 0.05));
}

template <bool kTensor>
void measure_issue(Buffer<char>& global, Buffer<uint32_t>& out) {
  auto kernel = issue_kernel<kTensor>;
  allow_smem(kernel, kSmem);
  for (int bytes : {1024, 2048, 4096, 8192, 16384}) {
    CUtensorMap map = make_map(global.data, kColdBytes, bytes);
    auto run = [&](int count, int which) {
      return median_of(9, [&] {
        kernel<<<1, 32, kSmem>>>(map, global.data, bytes, count, out.data);
        sync_and_check();
        return double(out.read()[which]);
      });
    };
    Row("tma_issue")("copy", kTensor ? "tensor" : "bulk")("bytes", bytes)(
        "issue_interval", (run(40, 0) - run(8, 0)) / 32)("completion_interval", (run(40, 1) - run(8, 1)) / 32)(
        "bytes_per_cycle", 32.0 * bytes / (run(40, 1) - run(8, 1)));
  }
}

void measure_multicast(Buffer<char>& global, Buffer<uint32_t>& out) {
  allow_smem(multicast_kernel, kSmem);
  constexpr int kCount = 64;
  const char* modes[] = {"own copy each", "one CTA for both", "half each to both"};
  for (int bytes : {2048, 8192, 32768})
    for (int mode = 0; mode < 3; ++mode) {
      std::vector<double> ranks[2];
      for (int launch = 0; launch < 4; ++launch) {
        multicast_kernel<<<2, 32, kSmem>>>(mode, global.data, bytes, kCount, out.data);
        sync_and_check();
        if (launch == 0) continue;
        auto host = out.read();
        for (int i = 0; i < kCount; ++i)
          for (int r = 0; r < 2; ++r) ranks[r].push_back(host[r * kCount + i]);
      }
      Row("tma_multicast")("mode", modes[mode])("bytes", bytes)("cycles_cta0", median(ranks[0]))("cycles_cta1",
                                                                                                 median(ranks[1]));
    }
}

void measure_store(Buffer<char>& global, Buffer<uint32_t>& out) {
  allow_smem(store_kernel, kSmem);
  for (int bytes : {2048, 4096, 8192, 16384, 32768, 65536}) {
    store_kernel<<<1, 128, kSmem>>>(global.data, bytes, out.data);
    sync_and_check();
    auto host = out.read();
    std::vector<double> values[5];
    for (int repeat = 2; repeat < 8; ++repeat)
      for (int v = 0; v < 5; ++v) values[v].push_back(host[repeat * 5 + v]);
    Row("tma_store")("bytes", bytes)("proxy_fence", median(values[0]))("syncthreads", median(values[1]))(
        "issue", median(values[2]))("read_done", median(values[3]))("written", median(values[4]));
  }
}

int main() {
  warm_up();
  Buffer<char> global(kColdBytes);
  // Push the zeros of the initial fill out of L2.
  CHECK(cudaMemset(global.data, 1, kColdBytes));
  CHECK(cudaDeviceSynchronize());
  Buffer<uint32_t> out(256);
  table("tma_latency", "one copy from arming the mbarrier to the successful wait, by size",
        {{"copy", ""}, {"bytes", "bytes"}, {"from", ""}, {"cycles", "cycles"}, {"p10", "cycles"}, {"p90", "cycles"}});
  table("tma_miss", "tensor copies as in tma_latency, one after the other through 16 MB: 992 of each kind",
        {{"bytes", "bytes"}, {"from", ""}, {"quantile", ""}, {"cycles", "cycles"}});
  table("tma_issue", "one elected thread issues copies without waiting: interval of issue and of completion (L2 hits)",
        {{"copy", ""},
         {"bytes", "bytes"},
         {"issue_interval", "cycles"},
         {"completion_interval", "cycles"},
         {"bytes_per_cycle", "bytes/cycle"}});
  table("tma_multicast",
        "cluster of two, both CTAs need the same bytes (L2 hits): cycles from issue to arrival in each CTA",
        {{"mode", ""}, {"bytes", "bytes"}, {"cycles_cta0", "cycles"}, {"cycles_cta1", "cycles"}});
  table("tma_store", "shared-memory writes by 128 threads, proxy fence, sync, bulk store; waits count from the issue",
        {{"bytes", "bytes"},
         {"proxy_fence", "cycles"},
         {"syncthreads", "cycles"},
         {"issue", "cycles"},
         {"read_done", "cycles"},
         {"written", "cycles"}});
  measure_latency<false>(global, out);
  measure_latency<true>(global, out);
  measure_miss(global, out);
  measure_issue<false>(global, out);
  measure_issue<true>(global, out);
  measure_multicast(global, out);
  measure_store(global, out);
  finish();
}
