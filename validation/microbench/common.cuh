// Shared by all microbenchmarks: error checks, the JSON lines that run.py reads, clocks, mbarriers and bulk copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#define CHECK(call)                                                                         \
  do {                                                                                      \
    cudaError_t status_ = (call);                                                           \
    if (status_ != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

// ---- output: one JSON object a line ----

// Announces a table: what it answers and the unit of every column ("" for counts and names).
inline void table(const char* name, const char* question,
                  std::initializer_list<std::pair<const char*, const char*>> columns) {
  std::printf("{\"table\": \"%s\", \"question\": \"%s\", \"units\": {", name, question);
  const char* comma = "";
  for (const auto& [column, unit] : columns) {
    std::printf("%s\"%s\": \"%s\"", comma, column, unit);
    comma = ", ";
  }
  std::printf("}}\n");
}

// Row("name")("column", value)...; is printed when the full expression ends.
class Row {
 public:
  explicit Row(const char* table_name) : text_("{\"row\": \"" + std::string(table_name) + "\"") {}
  ~Row() {
    std::printf("%s}\n", text_.c_str());
    std::fflush(stdout);
  }
  template <typename T>
  Row& operator()(const char* key, T value) {
    if constexpr (std::is_integral_v<T>) {
      return put(key, std::to_string(value));
    } else if constexpr (std::is_floating_point_v<T>) {
      char buffer[32];
      std::snprintf(buffer, sizeof buffer, "%.5g", double(value));
      return put(key, buffer);
    } else {
      return put(key, "\"" + std::string(value) + "\"");
    }
  }

 private:
  Row& put(const char* key, const std::string& value) {
    text_ += ", \"" + std::string(key) + "\": " + value;
    return *this;
  }
  std::string text_;
};

// ---- clocks ----

__device__ __forceinline__ uint64_t global_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}
__device__ __forceinline__ uint64_t cycles64() {
  uint64_t cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}
// Low half. Read through %clock64, because the compiler may fetch %clock by the slower uniform path.
__device__ __forceinline__ uint32_t clock32() { return uint32_t(cycles64()); }
__device__ __forceinline__ uint32_t sm_id() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

// SM cycles and nanoseconds of every timed kernel of this program, summed by thread 0 of CTA 0.
__device__ unsigned long long meter_cycles, meter_ns;

struct Meter {
  uint64_t cycles, ns;
  __device__ Meter() : cycles(cycles64()), ns(global_ns()) {}
  __device__ void stop() const {
    uint64_t cycles_now = cycles64(), ns_now = global_ns();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      atomicAdd(&meter_cycles, cycles_now - cycles);
      atomicAdd(&meter_ns, ns_now - ns);
    }
  }
};

// Spins, so that the chip leaves its idle clock before anything is timed.
__global__ void spin_kernel(uint64_t ns) {
  for (uint64_t start = global_ns(); global_ns() - start < ns;) {
  }
}
inline void warm_up(int milliseconds = 200) {
  spin_kernel<<<132, 128>>>(uint64_t(milliseconds) * 1000000);
  CHECK(cudaDeviceSynchronize());
}

// Last line of every program: the mean SM clock over its timed kernels.
inline void finish() {
  unsigned long long cycles = 0, ns = 0;
  CHECK(cudaMemcpyFromSymbol(&cycles, meter_cycles, sizeof cycles));
  CHECK(cudaMemcpyFromSymbol(&ns, meter_ns, sizeof ns));
  std::printf("{\"sm_clock_mhz\": %.1f}\n", ns ? 1e3 * double(cycles) / double(ns) : 0.0);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}
inline double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[size_t(q * double(values.size() - 1) + 0.5)];
}
// Median of `repeats` calls after one that is thrown away.
inline double median_of(int repeats, const std::function<double()>& measure) {
  measure();
  std::vector<double> values;
  for (int i = 0; i < repeats; ++i) values.push_back(measure());
  return median(values);
}

template <typename Kernel>
void allow_smem(Kernel kernel, int bytes) {
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}
inline void sync_and_check() {
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
}

// Device array that the host can fill and read; freed with the process.
template <typename T>
struct Buffer {
  explicit Buffer(size_t count) : count(count) {
    CHECK(cudaMalloc(&data, count * sizeof(T)));
    CHECK(cudaMemset(data, 0, count * sizeof(T)));
  }
  std::vector<T> read() const {
    std::vector<T> host(count);
    CHECK(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  void write(const std::vector<T>& host) const {
    CHECK(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  T* data = nullptr;
  size_t count;
};

// ---- shared memory, mbarriers, bulk copies (PTX ISA, sections on mbarrier and cp.async.bulk) ----

__device__ __forceinline__ uint32_t smem_u32(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void mbar_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbar_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_u32(bar)) : "memory");
}
__device__ __forceinline__ void mbar_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbar_try(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(smem_u32(bar)), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ __forceinline__ void mbar_wait(uint64_t* bar, uint32_t parity) {
  while (!mbar_try(bar, parity)) {
  }
}
__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_u32(smem)),
      "l"(global), "r"(bytes), "r"(smem_u32(bar))
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem_u32(smem)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// True in one lane of a converged warp; the compiler then issues bulk copies without a loop over lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected)::"memory");
  return elected != 0;
}

__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// True in all 128 threads of a warpgroup when it holds in one of them. wgmma must be issued by all four warps alike, so
// a loop that ends by the clock needs a common decision.
__device__ __forceinline__ bool warpgroup_any(int barrier, bool condition) {
  uint32_t any;
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %2, 0; barrier.cta.red.or.pred q, %1, 128, p; selp.u32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(barrier), "r"(uint32_t(condition))
               : "memory");
  return any != 0;
}

// ---- data ----

// Roughly normal numbers (sum of four uniforms) from a hash, so that operands toggle like real ones.
__device__ __forceinline__ float noise(uint32_t seed) {
  float sum = 0.f;
  for (int i = 0; i < 4; ++i) {
    seed = seed * 747796405u + 2891336453u;
    uint32_t word = ((seed >> ((seed >> 28) + 4)) ^ seed) * 277803737u;
    sum += float(word >> 8) * (1.f / 16777216.f);
  }
  return (sum - 2.f) * 1.732f;
}
// Fills `bytes` of shared memory with bfloat16 noise (zeros when `scale` is 0), by all threads of the CTA.
__device__ __forceinline__ void fill_smem(void* smem, int bytes, float scale) {
  auto* words = static_cast<__nv_bfloat16*>(smem);
  for (int i = threadIdx.x; i < bytes / 2; i += blockDim.x)
    words[i] = __float2bfloat16(scale == 0.f ? 0.f : scale * noise(i + blockIdx.x * 7919u));
  fence_async();
  __syncthreads();
}
