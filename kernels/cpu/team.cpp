#include "team.h"

#include <algorithm>
#include <climits>
#include <mutex>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace baton {
namespace {

// A thread that waits spins first (about 50 microseconds, longer than a phase), then offers its core to others again and again,
// then sleeps. Sleeping at once would look to the scheduler as if two threads that wait in turn needed one core between them:
// beside a busy neighbour it then leaves both on the same core, at half the speed, for good.
constexpr int kSpins = 2000;
constexpr int kYields = 2000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

int num_allowed_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

struct alignas(64) Helper {
  std::atomic<uint32_t> num_regions{0};  // regions this thread was called to
};

class Team {
 public:
  bool try_run(int threads, RegionBody body, void* argument) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    hire(threads - 1);
    body_ = body, argument_ = argument, size_ = threads;
    spins_ = threads <= num_allowed_cpus() ? kSpins : 0;
    for (int i = 0; i < threads - 1; ++i) {
      helpers_[i]->num_regions.fetch_add(1, std::memory_order_seq_cst);
      wake(helpers_[i]->num_regions);
    }
    Crew crew(shared_, 0, threads, spins_);
    body(crew, argument);
    crew.barrier();
    return true;
  }

 private:
  void hire(int count) {
    while (int(helpers_.size()) < count) {
      Helper* helper = new Helper;  // lives as long as its thread: for ever
      const int rank = int(helpers_.size()) + 1;
      helpers_.push_back(helper);
      std::thread([this, helper, rank] { serve(*helper, rank); }).detach();
    }
  }

  void serve(Helper& helper, int rank) {
    for (uint32_t seen = 0;; ++seen) {
      while (helper.num_regions.load(std::memory_order_seq_cst) == seen) sleep_while(helper.num_regions, seen);
      Crew crew(shared_, rank, size_, spins_);
      body_(crew, argument_);
      crew.barrier();
    }
  }

  std::mutex turn_;
  std::vector<Helper*> helpers_;
  TeamShared shared_;
  RegionBody body_ = nullptr;
  void* argument_ = nullptr;
  int size_ = 0, spins_ = 0;
};

// The process's team. A forked child has none of its parent's threads and makes its own.
Team& team() {
  static std::atomic<Team*> current{nullptr};
  static std::atomic<pid_t> owner{0};
  static std::mutex making;
  if (owner.load(std::memory_order_acquire) != getpid()) {
    std::lock_guard<std::mutex> lock(making);
    if (owner.load(std::memory_order_relaxed) != getpid()) {
      current.store(new Team, std::memory_order_relaxed);
      owner.store(getpid(), std::memory_order_release);
    }
  }
  return *current.load(std::memory_order_relaxed);
}

}  // namespace

void Crew::barrier() {
  if (size == 1) return;
  const uint32_t phase = shared_.phase.load(std::memory_order_acquire);
  if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
    shared_.arrived.store(0, std::memory_order_relaxed);
    shared_.next.store(0, std::memory_order_relaxed);
    shared_.phase.store(phase + 1, std::memory_order_seq_cst);
    if (shared_.num_sleeping.load(std::memory_order_seq_cst)) wake(shared_.phase);
    return;
  }
  for (int spin = 0; spin < spins_; ++spin) {
    if (shared_.phase.load(std::memory_order_acquire) != phase) return;
    relax();
  }
  for (int turn = 0; turn < kYields; ++turn) {
    if (shared_.phase.load(std::memory_order_acquire) != phase) return;
    sched_yield();
  }
  shared_.num_sleeping.fetch_add(1, std::memory_order_seq_cst);
  while (shared_.phase.load(std::memory_order_seq_cst) == phase) sleep_while(shared_.phase, phase);
  shared_.num_sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

void run_region(int threads, RegionBody body, void* argument) {
  if (threads > 1 && team().try_run(threads, body, argument)) return;
  TeamShared alone;
  Crew crew(alone, 0, 1, 0);
  body(crew, argument);
}

}  // namespace baton
