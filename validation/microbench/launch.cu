// Launch ramp of kernels inside a graph, and turnover of CTAs that fill an SM.
#include <map>

#include "common.cuh"

__global__ void empty_kernel() {}

struct Stamp {
  uint64_t start_ns, end_ns;
  uint64_t start, end;  // SM cycles
  uint32_t sm, unused;
};

// Works for `cycles`, then ends; thread 0 stamps both ends.
__global__ void stamp_kernel(uint32_t cycles, Stamp* out) {
  extern __shared__ char smem[];
  Meter meter;
  uint64_t start = cycles64(), start_ns = global_ns();
  smem[threadIdx.x] = 1;
  while (cycles64() - start < cycles) {
  }
  __syncthreads();
  meter.stop();
  if (threadIdx.x == 0) out[blockIdx.x] = {start_ns, global_ns(), start, cycles64(), sm_id(), 0};
}

// Mean time of one of `count` kernels in a graph, microseconds.
template <typename Launch>
double graph_time(int count, Launch launch) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < count; ++i) launch(stream);
  cudaGraph_t graph;
  CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  double us = median_of(9, [&] {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    return 1e3 * ms;
  });
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  return us / count;
}

// Cycles between the end of a CTA and the start of the next on the same SM and slot order.
std::vector<double> turnover_gaps(const std::vector<Stamp>& stamps) {
  std::map<uint32_t, std::vector<Stamp>> by_sm;
  for (const Stamp& s : stamps) by_sm[s.sm].push_back(s);
  std::vector<double> gaps;
  for (auto& [sm, list] : by_sm) {
    std::sort(list.begin(), list.end(), [](const Stamp& a, const Stamp& b) { return a.start < b.start; });
    for (size_t i = 1; i < list.size(); ++i) gaps.push_back(double(list[i].start) - double(list[i - 1].end));
  }
  return gaps;
}

int main() {
  warm_up();
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  allow_smem(stamp_kernel, 227 * 1024);
  Buffer<Stamp> out(size_t(sms) * 64);

  table("empty_kernel", "time of an empty kernel inside a graph of 200, by grid and threads",
        {{"ctas", ""}, {"threads", ""}, {"time", "us"}});
  for (int threads : {32, 128, 384})
    for (int ctas : {1, sms / 4, sms / 2, sms, 2 * sms, 4 * sms, 8 * sms, 16 * sms, 64 * sms})
      Row("empty_kernel")("ctas", ctas)("threads", threads)(
          "time", graph_time(200, [&](cudaStream_t s) { empty_kernel<<<ctas, threads, 0, s>>>(); }));

  table("kernel_overhead", "kernels in a graph that work a given time on every SM (384 threads): time beyond that work",
        {{"smem", "bytes"}, {"work", "cycles"}, {"time", "us"}, {"overhead", "us"}});
  for (int smem : {1024, 227 * 1024})
    for (int work : {2000, 20000}) {
      double us = graph_time(50, [&](cudaStream_t s) { stamp_kernel<<<sms, 384, smem, s>>>(work, out.data); });
      auto stamps = out.read();
      double ns = 0;
      for (int b = 0; b < sms; ++b) ns += double(stamps[b].end_ns - stamps[b].start_ns) / sms;
      Row("kernel_overhead")("smem", smem)("work", work)("time", us)("overhead", us - ns / 1e3);
    }

  table(
      "cta_turnover", "cycles between the end of a CTA and the start of the next on its SM (one CTA fills the SM)",
      {{"waves", ""}, {"threads", ""}, {"smem", "bytes"}, {"p10", "cycles"}, {"median", "cycles"}, {"p90", "cycles"}});
  for (int threads : {128, 384})
    for (int smem : {120 * 1024, 227 * 1024})
      for (int waves : {2, 4, 8}) {
        std::vector<double> gaps;
        for (int launch = 0; launch < 5; ++launch) {
          stamp_kernel<<<sms * waves, threads, smem>>>(20000, out.data);
          sync_and_check();
          auto stamps = out.read();
          stamps.resize(size_t(sms) * waves);
          for (double gap : turnover_gaps(stamps)) gaps.push_back(gap);
        }
        Row("cta_turnover")("waves", waves)("threads", threads)("smem", smem)("p10", quantile(gaps, 0.1))(
            "median", median(gaps))("p90", quantile(gaps, 0.9));
      }
  finish();
}
