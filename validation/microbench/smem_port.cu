// The shared-memory port under wgmma: one warpgroup issues wgmma m64nNk16, another loads or stores shared memory, or
// four warps keep bulk copies from L2 in flight, at an increasing rate. And what loads and stores do to EX2.
#include "mma_stream.cuh"

constexpr int kSmemOther = 131072, kSmem = kMmaSmem + kSmemOther;

enum class Traffic { kLoad, kStore, kLdmatrix, kStmatrix, kBulkFill };
const char* traffic_name(Traffic traffic) {
  static const char* names[] = {"ld.shared.v4", "st.shared.v4", "ldmatrix.x4", "stmatrix.x4", "bulk copy fill"};
  return names[int(traffic)];
}

template <Traffic kTraffic>
__device__ __forceinline__ void access(uint32_t at, uint32_t (&x)[4]) {
  if constexpr (kTraffic == Traffic::kLoad)
    asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
  if constexpr (kTraffic == Traffic::kStore)
    asm volatile("st.volatile.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  if constexpr (kTraffic == Traffic::kLdmatrix) {
    uint32_t y[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                 : "r"(at)
                 : "memory");
    x[0] ^= y[0];
  }
  if constexpr (kTraffic == Traffic::kStmatrix)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Endless traffic of one warp of a warpgroup, counted in bytes: 8 accesses of 512 bytes, then `hops` idle hops.
template <Traffic kTraffic>
__device__ __forceinline__ Count traffic_window(uint32_t origin, int hops, char* smem, float* sink) {
  Idle idle;
  uint32_t x[4] = {};
  uint32_t at = smem_u32(smem + kMmaSmem) + threadIdx.x % 128 / 32 * 4096 + threadIdx.x % 32 * 16;
  Count count = windowed(origin, [&] {
#pragma unroll
    for (int i = 0; i < 8; ++i) access<kTraffic>(at + i * 512, x);
    at ^= 16384;  // new addresses, so that no load is the same as one before
    idle(hops);
    return 8 * 512;
  });
  idle.keep(sink);
  if (sink != nullptr) sink[threadIdx.x] = float(x[0] + x[1] + x[2] + x[3]);
  return count;
}

// Warpgroup 0 (when `mma`): wgmma; then `warps` warps of traffic: 8 accesses of 512 bytes, then `hops` idle hops. Bulk
// fill: four warps, each with a ring of `warps` copies of `hops` bytes.
template <int N, bool kRs, Traffic kTraffic>
__global__ void __launch_bounds__(256, 1)
    port_kernel(bool mma, int warps, int hops, const char* global, Count* out, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ uint64_t full[32];
  __shared__ uint32_t last;
  if (threadIdx.x == 0) last = kNever;
  if (threadIdx.x < 32) mbar_init(&full[threadIdx.x], 1);
  mbar_fence_init();
  fill_smem(smem, kSmem, 1.f);
  int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32;
  uint32_t origin = common_origin();
  Meter meter;
  Count count{};
  if (group == 0) {
    if (mma) count = mma_window<N, kRs>(origin, smem, &last, sink);
  } else if constexpr (kTraffic == Traffic::kBulkFill) {
    int depth = warps, bytes = hops, slot = 0, offset = warp * bytes, loaded = 0;
    uint32_t parity = 1;  // the ring starts empty
    char* ring = smem + kMmaSmem + warp * depth * bytes;
    uint64_t* bars = full + warp * depth;
    count = windowed(origin, [&] {
      if (loaded++ >= depth) mbar_wait(&bars[slot], parity);
      if (elect_one()) {
        mbar_expect(&bars[slot], bytes);
        bulk_load(ring + slot * bytes, global + offset, bytes, &bars[slot]);
      }
      offset = (offset + 4 * bytes) & 0x1fffff;  // 2 MB, stays in L2
      if (++slot == depth) slot = 0, parity ^= 1;
      return bytes;
    });
    for (int s = 0; s < depth; ++s) {
      mbar_wait(&bars[slot], parity);
      if (++slot == depth) slot = 0, parity ^= 1;
    }
  } else if (warp < warps) {
    count = traffic_window<kTraffic>(origin, hops, smem, sink);
  }
  meter.stop();
  if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = count;
}

template <int N, bool kRs, Traffic kTraffic>
void measure_point(int warps, int hops, Buffer<char>& global, Buffer<Count>& out) {
  auto kernel = port_kernel<N, kRs, kTraffic>;
  allow_smem(kernel, kSmem);
  auto run = [&](bool mma) {
    std::vector<double> interval, rate;
    for (int launch = 0; launch < 4; ++launch) {
      kernel<<<1, 256, kSmem>>>(mma, warps, hops, global.data, out.data, nullptr);
      sync_and_check();
      if (launch == 0) continue;
      auto host = out.read();
      double bytes = 0;
      for (int w = 4; w < 8; ++w)
        if (host[w].cycles) bytes += double(host[w].instr) / host[w].cycles;
      interval.push_back(mma ? double(host[0].cycles) / host[0].instr : 0);
      rate.push_back(bytes);
    }
    return std::pair(median(interval), median(rate));
  };
  auto [unused, alone] = run(false);
  (void)unused;
  auto [interval, together] = run(true);
  double mma_port = 32.0 * N + (kRs ? 0 : 2048);
  Row("smem_port")("n", N)("operand", kRs ? "rs" : "ss")("traffic", traffic_name(kTraffic))(
      kTraffic == Traffic::kBulkFill ? "copies_per_warp" : "warps", warps)(
      kTraffic == Traffic::kBulkFill ? "copy_bytes" : "idle_hops", hops)("traffic_alone", alone)(
      "traffic_beside", together)("mma_cycles_per_instr", interval)("port_total", together + mma_port / interval);
}

template <int N, bool kRs, Traffic kTraffic>
void measure_sweep(Buffer<char>& global, Buffer<Count>& out) {
  if constexpr (kTraffic == Traffic::kBulkFill) {
    for (int bytes : {512, 1024, 2048, 4096, 8192})
      for (int depth : {1, 2, 4}) measure_point<N, kRs, kTraffic>(depth, bytes, global, out);
  } else {
    for (int warps : {1, 4})
      for (int hops : {24, 12, 8, 4, 2, 0}) measure_point<N, kRs, kTraffic>(warps, hops, global, out);
  }
}

template <int N, bool kRs>
void measure_width(Buffer<char>& global, Buffer<Count>& out) {
  measure_sweep<N, kRs, Traffic::kLoad>(global, out);
  measure_sweep<N, kRs, Traffic::kStore>(global, out);
  measure_sweep<N, kRs, Traffic::kLdmatrix>(global, out);
  measure_sweep<N, kRs, Traffic::kStmatrix>(global, out);
  measure_sweep<N, kRs, Traffic::kBulkFill>(global, out);
}

// Warpgroup 0 (when `mma`): wgmma; warpgroup 1 (when `traffic`): 8 accesses of 512 bytes by each warp, then `hops` idle
// hops; warpgroup 2: an endless stream of EX2, which leave a sub-core by the same queue as loads and stores.
template <int N, bool kRs, Traffic kTraffic>
__global__ void __launch_bounds__(384, 1)
    ex2_kernel(bool mma, bool traffic, int hops, Count* out, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ uint32_t last;
  if (threadIdx.x == 0) last = kNever;
  fill_smem(smem, kSmem, 1.f);
  int group = threadIdx.x / 128;
  uint32_t origin = common_origin();
  Meter meter;
  Count count{};
  if (group == 0) {
    if (mma) count = mma_window<N, kRs>(origin, smem, &last, sink);
  } else if (group == 1) {
    if (traffic) count = traffic_window<kTraffic>(origin, hops, smem, sink);
  } else {
    count = vector_window<Op::kEx2>(origin, -1, sink);
  }
  meter.stop();
  if (threadIdx.x % 128 == 0) out[group] = count;
}

// Without wgmma (n = 0) once for each kind of traffic, at N = 64.
template <int N, bool kRs, Traffic kTraffic>
void measure_ex2() {
  static Buffer<Count> out(3);
  auto kernel = ex2_kernel<N, kRs, kTraffic>;
  allow_smem(kernel, kSmem);
  for (bool mma : {false, true})
    for (int hops : {-1, 24, 12, 8, 4, 2, 0}) {
      if (!mma && N != 64) continue;
      std::vector<double> cycles[3];
      for (int launch = 0; launch < 4; ++launch) {
        kernel<<<1, 384, kSmem>>>(mma, hops >= 0, hops, out.data, nullptr);
        sync_and_check();
        auto host = out.read();
        for (int g = 0; launch > 0 && g < 3; ++g)
          cycles[g].push_back(host[g].instr ? double(host[g].cycles) / host[g].instr : 0);
      }
      double rate = hops < 0 ? 0 : 4 / median(cycles[1]);
      Row("smem_ex2")("n", mma ? N : 0)("operand", kRs ? "rs" : "ss")("traffic", traffic_name(kTraffic))("idle_hops", hops)(
          "traffic_rate", rate)("ex2_cycles", median(cycles[2]))("mma_cycles_per_instr", median(cycles[0]));
    }
}

int main() {
  warm_up();
  prepare_idle();
  Buffer<char> global(4 << 20);
  Buffer<Count> out(8);
  table("smem_port",
        "wgmma beside shared-memory traffic (bulk copies from L2 by 4 warps): rate of the traffic alone and beside "
        "wgmma, interval of wgmma, and the "
        "sum of "
        "operand reads (A 2048 bytes if ss, B 32 N bytes per instruction) and traffic",
        {{"n", ""},
         {"operand", ""},
         {"traffic", ""},
         {"warps", ""},
         {"idle_hops", ""},
         {"copies_per_warp", ""},
         {"copy_bytes", "bytes"},
         {"traffic_alone", "bytes/cycle"},
         {"traffic_beside", "bytes/cycle"},
         {"mma_cycles_per_instr", "cycles"},
         {"port_total", "bytes/cycle"}});
  measure_width<64, false>(global, out);
  measure_width<128, false>(global, out);
  measure_width<128, true>(global, out);
  measure_width<256, false>(global, out);
  table("smem_ex2",
        "an endless stream of EX2 from one warpgroup beside loads or stores of shared memory from another (idle_hops "
        "-1: none), without and with wgmma from a third: rate of the traffic, cycles per EX2, interval of wgmma",
        {{"n", ""},
         {"operand", ""},
         {"traffic", ""},
         {"idle_hops", ""},
         {"traffic_rate", "bytes/cycle"},
         {"ex2_cycles", "cycles"},
         {"mma_cycles_per_instr", "cycles"}});
  measure_ex2<64, false, Traffic::kStmatrix>();
  measure_ex2<192, false, Traffic::kStmatrix>();
  measure_ex2<128, true, Traffic::kStmatrix>();
  measure_ex2<64, false, Traffic::kStore>();
  measure_ex2<64, false, Traffic::kLoad>();
  measure_ex2<64, false, Traffic::kLdmatrix>();
  finish();
}
