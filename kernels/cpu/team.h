// A team of threads for parallel regions made of many short phases: a decoder step has some 300 of them, each of microseconds.
//
// Inside a region threads wait for each other by spinning for a moment and then sleeping; between regions they sleep at once,
// so an idle engine takes no CPU from its neighbours. Work is handed out unit by unit to whichever thread is free: a thread
// that lost its core for a while holds up one unit, not its whole share. Who computes a unit never changes its result.
#pragma once

#include <atomic>
#include <cstdint>

namespace baton {

struct TeamShared {
  alignas(64) std::atomic<int64_t> next{0};      // the next unit of the running phase
  alignas(64) std::atomic<int> arrived{0};       // threads at the barrier
  alignas(64) std::atomic<uint32_t> phase{0};    // number of barriers passed
  std::atomic<int> num_sleeping{0};              // threads asleep at the barrier
};

// One thread's part in a region. Every thread of the region calls the same phases in the same order.
class Crew {
 public:
  Crew(TeamShared& shared, int rank, int size, int spins) : rank(rank), size(size), shared_(shared), spins_(spins) {}

  const int rank, size;

  // Calls body(unit) once for each unit in [0, count), on any thread. When it returns all calls have returned on all threads.
  template <typename F>
  void each(int64_t count, F&& body) {
    if (size == 1) {
      for (int64_t unit = 0; unit < count; ++unit) body(unit);
      return;
    }
    for (int64_t unit; (unit = shared_.next.fetch_add(1, std::memory_order_relaxed)) < count;) body(unit);
    barrier();
  }

  // Returns when every thread of the region has called it. What they wrote before is visible afterwards.
  void barrier();

 private:
  TeamShared& shared_;
  const int spins_;
};

using RegionBody = void (*)(Crew& crew, void* argument);
void run_region(int threads, RegionBody body, void* argument);

// Runs body(crew) on `threads` threads, the calling one among them, and returns when all have ended. While another thread of
// the process runs a region, the body runs on the calling thread alone: the same results, later.
template <typename F>
void parallel(int threads, F&& body) {
  run_region(threads, [](Crew& crew, void* argument) { (*static_cast<F*>(argument))(crew); }, &body);
}

}  // namespace baton
