// L2 and HBM: latency by pointer chase, and read bandwidth of bulk copies by bytes in flight and number of SMs.
#include <numeric>
#include <random>

#include "common.cuh"

constexpr int kHops = 4096, kDependent = 8;

__global__ void chase_kernel(const uint64_t* start, int hops, uint32_t* out) {
  Meter meter;
  auto address = reinterpret_cast<uint64_t>(start);
  uint32_t begin = clock32();
#pragma unroll 1
  for (int i = 0; i < hops; ++i) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(address)::"memory");
  uint32_t end = clock32();
  meter.stop();
  out[0] = end - begin;
  out[1] = uint32_t(address);
}

constexpr int kLineStride = 4096;

// Every line holds its own address.
__global__ void point_kernel(char* data, int lines) {
  for (int line = threadIdx.x; line < lines; line += blockDim.x) {
    char* at = data + size_t(line) * kLineStride;
    *reinterpret_cast<uint64_t*>(at) = reinterpret_cast<uint64_t>(at);
  }
}

// Latency of single lines by dependent loads of the same line, seen by CTA `who`, one to an SM: near and far parts of
// L2.
__global__ void line_kernel(const char* data, int lines, unsigned who, uint32_t* out) {
  if (blockIdx.x != who) return;
  for (int line = 0; line < lines; ++line) {
    uint32_t best = ~0u;
    auto address = reinterpret_cast<uint64_t>(data + size_t(line) * kLineStride);
    for (int repeat = 0; repeat < 4; ++repeat) {
      uint32_t begin = clock32();
#pragma unroll 1
      for (int i = 0; i <= kDependent;
           ++i)  // the last load is issued, which waits for the one before, but not waited for
        asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(address)::"memory");
      uint32_t cycles = (clock32() - begin) / kDependent;
      if (cycles < best) best = cycles;
    }
    out[blockIdx.x * lines + line] = best + uint32_t(address >> 63);  // uses the loads
  }
}

__global__ void fill_kernel(uint32_t* data, size_t words) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x)
    data[i] = __float_as_uint(noise(uint32_t(i)));
}

// Every warp streams its share of `total` bytes through a ring of its own of `stages` copies of `bytes`; `loops`
// passes.
__global__ void stream_kernel(const char* data, size_t total, int bytes, int stages, int loops, uint64_t* out) {
  extern __shared__ __align__(128) char smem[];
  __shared__ uint64_t barriers[64];
  int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  uint64_t* full = barriers + warp * stages;
  char* ring = smem + warp * stages * bytes;
  if (lane < stages) mbar_init(&full[lane], 1);
  mbar_fence_init();
  __syncthreads();
  size_t streams = size_t(gridDim.x) * warps, first = (size_t(blockIdx.x) * warps + warp) * bytes;
  int chunks = int(total / bytes / streams);  // per warp and pass; neighbouring warps read neighbouring chunks
  int copies = chunks * loops;
  size_t stride = streams * bytes, offset = first;
  int slot = 0, chunk = 0;
  uint32_t parity = 1;  // the ring starts empty
  Meter meter;
  uint64_t ns = global_ns(), cycles = cycles64();
#pragma unroll 1
  for (int i = 0; i < copies + stages; ++i) {
    if (i >= stages) mbar_wait(&full[slot], parity);
    if (i < copies && elect_one()) {
      mbar_expect(&full[slot], bytes);
      bulk_load(ring + slot * bytes, data + offset, bytes, &full[slot]);
    }
    offset += stride;
    if (++chunk == chunks) chunk = 0, offset = first;
    if (++slot == stages) slot = 0, parity ^= 1;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    out[3 * blockIdx.x] = cycles64() - cycles;
    out[3 * blockIdx.x + 1] = ns;
    out[3 * blockIdx.x + 2] = global_ns();
  }
  meter.stop();
}

void measure_chase(Buffer<char>& data, Buffer<uint32_t>& out) {
  std::mt19937_64 random(1);
  for (int megabytes : {1, 4, 16, 24, 32, 48, 64, 256, 1024}) {
    size_t lines = (size_t(megabytes) << 20) / 128;
    size_t nodes = std::min<size_t>(lines, size_t(1) << 20);
    // A random cycle over `nodes` lines spread evenly over the set.
    std::vector<uint32_t> order(nodes);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    size_t words = 16 * (lines / nodes);
    auto base = reinterpret_cast<uint64_t>(data.data);
    std::vector<uint64_t> image(nodes * words, 0);
    for (size_t i = 0; i < nodes; ++i) image[order[i] * words] = base + size_t(order[(i + 1) % nodes]) * words * 8;
    CHECK(cudaMemcpy(data.data, image.data(), image.size() * 8, cudaMemcpyHostToDevice));
    int hops = int(nodes);
    const auto* start = reinterpret_cast<const uint64_t*>(base + size_t(order[0]) * words * 8);
    double cycles = 0;
    for (int pass = 0; pass < 2; ++pass) {  // the second pass finds in L2 what fits
      chase_kernel<<<1, 1>>>(start, hops, out.data);
      sync_and_check();
      cycles = out.read()[0];
    }
    Row("latency_by_set")("set", megabytes)("hops", hops)("cycles", cycles / hops);
  }
  // HBM with the TLB warm: lines 4 KB apart in 128 MB, L2 flushed by writing elsewhere, no line read twice.
  std::vector<uint32_t> order(32768);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<uint64_t> image(order.size() * 512, 0);
  auto base = reinterpret_cast<uint64_t>(data.data);
  for (size_t i = 0; i < order.size(); ++i)
    image[size_t(order[i]) * 512] = base + size_t(order[(i + 1) % order.size()]) * 4096;
  CHECK(cudaMemcpy(data.data, image.data(), image.size() * 8, cudaMemcpyHostToDevice));
  std::vector<double> cold;
  for (int i = 0; i < 7; ++i) {
    CHECK(cudaMemset(data.data + (size_t(1) << 30), i, size_t(1) << 30));
    chase_kernel<<<1, 1>>>(reinterpret_cast<const uint64_t*>(base + size_t(order[0]) * 4096), kHops, out.data);
    sync_and_check();
    cold.push_back(double(out.read()[0]) / kHops);
  }
  Row("latency_by_set")("set", 128)("hops", kHops)("cycles", median(cold))("note", "L2 flushed, no line read twice");
}

void measure_lines(int sms, Buffer<char>& data) {
  constexpr int kLines = 256;
  Buffer<uint32_t> out(size_t(sms) * kLines);
  point_kernel<<<1, 256>>>(data.data, kLines);
  for (int who = 0; who < sms; ++who) line_kernel<<<sms, 1>>>(data.data, kLines, who, out.data);
  sync_and_check();
  auto host = out.read();
  std::vector<double> all(host.begin(), host.end());
  for (double q : {0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99})
    Row("l2_hit_latency")("quantile", q)("cycles", quantile(all, q));
}

void measure_stream(int sms, Buffer<char>& data) {
  Buffer<uint64_t> out(3 * size_t(sms));
  allow_smem(stream_kernel, 200 * 1024);
  struct Ring {
    int bytes, stages, warps;
    int in_flight() const { return bytes * stages * warps; }
  };
  size_t next = 0;  // sets read once (loops = 1) walk through the buffer, so that L2 does not hold them
  auto run = [&](const char* level, int ctas, size_t total, int loops, Ring ring) {
    std::vector<double> per_cycle, per_second;
    for (int launch = 0; launch < 4; ++launch) {
      if (next + total > data.count) next = 0;
      const char* set = data.data + (loops == 1 ? next : 0);
      stream_kernel<<<ctas, 32 * ring.warps, ring.in_flight()>>>(set, total, ring.bytes, ring.stages, loops, out.data);
      next += total;
      sync_and_check();
      if (launch == 0) continue;
      auto host = out.read();
      double cycles = 0;
      uint64_t first = ~0ull, last = 0;
      for (int b = 0; b < ctas; ++b) {
        cycles += double(host[3 * b]) / ctas;
        first = std::min(first, host[3 * b + 1]);
        last = std::max(last, host[3 * b + 2]);
      }
      int streams = ctas * ring.warps;
      double bytes = double(total / ring.bytes / streams) * streams * ring.bytes * loops;
      per_cycle.push_back(bytes / ctas / cycles);
      per_second.push_back(bytes / double(last - first));
    }
    Row("stream")("level", level)("ctas", ctas)("warps", ring.warps)("copy_bytes", ring.bytes)("stages", ring.stages)(
        "in_flight", ring.in_flight())("per_sm", median(per_cycle))("chip", median(per_cycle) * ctas)(
        "throughput", median(per_second));
  };
  std::vector<Ring> rings = {{2048, 1, 1}, {2048, 4, 1},  {16384, 4, 1}, {1024, 1, 4}, {2048, 1, 4},
                             {2048, 2, 4}, {2048, 4, 4},  {4096, 1, 4},  {4096, 2, 4}, {8192, 1, 4},
                             {8192, 2, 4}, {16384, 1, 4}, {16384, 2, 4}, {16384, 3, 4}};
  for (Ring ring : rings) {
    run("l2", 1, size_t(2) << 20, 4, ring);
    run("l2", sms, size_t(20) << 20, 20, ring);
    run("hbm", 1, size_t(64) << 20, 1, ring);
    run("hbm", sms, size_t(4) << 30, 1, ring);
  }
  for (int ctas : {2, 4, 8, 16, 33, 66, 99}) {
    run("l2", ctas, size_t(16) << 20, 20, {16384, 2, 4});
    run("hbm", ctas, size_t(1) << 30, 1, {16384, 2, 4});
  }
  for (int megabytes : {10, 20, 25, 30, 35, 40, 45, 50, 60, 80, 120})
    run(("set " + std::to_string(megabytes) + " MB").c_str(), sms, size_t(megabytes) << 20, 20, {16384, 2, 4});
}

int main() {
  warm_up();
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  Buffer<char> data(size_t(4) << 30);
  Buffer<uint32_t> out(2);
  table("latency_by_set", "dependent 8-byte loads (ld.global.cg) over random 128-byte lines of a set, second pass",
        {{"set", "MB"}, {"hops", ""}, {"cycles", "cycles"}, {"note", ""}});
  table("l2_hit_latency", "single L2 hits, 256 lines seen from every SM in turn: spread between near and far lines",
        {{"quantile", ""}, {"cycles", "cycles"}});
  table("stream",
        "read bandwidth of bulk copies, one CTA an SM, each warp waits, arms and issues for a ring of its own: 'l2' "
        "reads 20 MB again and again (2 MB by one "
        "SM), "
        "'hbm' 4 GB once (64 MB by one SM, 1 GB by some), 'set' a set of that size 20 times",
        {{"level", ""},
         {"ctas", ""},
         {"warps", ""},
         {"copy_bytes", "bytes"},
         {"stages", ""},
         {"in_flight", "bytes/SM"},
         {"per_sm", "bytes/cycle/SM"},
         {"chip", "bytes/cycle"},
         {"throughput", "GB/s"}});
  measure_lines(sms, data);
  fill_kernel<<<1024, 256>>>(reinterpret_cast<uint32_t*>(data.data), data.count / 4);
  sync_and_check();
  measure_stream(sms, data);
  measure_chase(data, out);
  finish();
}
