// The runtime of cuda_emulator.h: a fibre per CUDA thread, one block at a time, all on one OS thread.
//
// Compile this file WITHOUT -fsanitize=thread, also for a binary that is otherwise built with it: the scheduler's own
// bookkeeping is not part of the program under test. For the same reason nothing may be allocated or freed while fibres
// run, templates are instantiated only over types of this file (the linker must not merge in instrumented copies), and
// memory of the kernel is copied byte by byte, not through memcpy, which the sanitizers intercept.
#include "cuda_emulator.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" {  // defined only in a program linked with -fsanitize=thread
__attribute__((weak)) void* __tsan_get_current_fiber(void);
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fibre);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fibre, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void*);
__attribute__((weak)) void __tsan_release(void*);
__attribute__((weak)) void __tsan_read_range(void*, long);
__attribute__((weak)) void __tsan_write_range(void*, long);
}

#ifndef __x86_64__
#error "engram_switch_stack is written for x86-64 only"
#endif
// Saves the callee-saved registers and the stack pointer (to *save), then continues on the stack `to`.
extern "C" void engram_switch_stack(void** save, void* to);
asm(R"(
.text
.globl engram_switch_stack
.type engram_switch_stack, @function
engram_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size engram_switch_stack, .-engram_switch_stack
)");

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
namespace {

constexpr int kWarp = 32, kMaxThreads = 1024, kMaxWarps = kMaxThreads / kWarp;
constexpr int kMaxCopies = 64;                 // asynchronous copies in flight in one thread
constexpr int kMaxMasks = 8;                   // different masks used with __syncwarp in one warp
constexpr int kMaxSharedArrays = 32;           // static shared arrays of one kernel
constexpr size_t kMaxSharedBytes = 48 * 1024;  // what every GPU gives without cudaFuncSetAttribute
constexpr int kMaxTsanFibres = 6000;           // libtsan has room for 8128 threads
constexpr size_t kPage = 4096, kArenaBytes = size_t{4} << 30;

const bool kTsan = __tsan_create_fiber != nullptr;

enum class State : uint8_t { ready, at_barrier, in_warp_operation, done };

struct Copy {
  char* to;
  const char* from;
  size_t bytes, zero_tail;
};

struct Fibre {
  char* stack = nullptr;  // its lowest usable byte; a guard page lies below
  void* stack_pointer = nullptr;
  void* tsan = nullptr;
  [[maybe_unused]] void* asan_fake_stack = nullptr;

  int thread = 0;  // linear index in the block
  uint3 index{};
  State state = State::done;

  int barrier_predicate = 0;
  Barrier barrier_kind = Barrier::plain;

  WarpOp warp_op = WarpOp::sync;
  const char* warp_op_name = "";
  uint32_t mask = 0;
  int source = 0;
  alignas(16) unsigned char in[16], out[16];

  Copy copies[kMaxCopies];
  int copies_in_flight = 0, copies_uncommitted = 0;
  int groups[kMaxCopies];  // sizes of the committed groups, oldest first
  int groups_in_flight = 0;
};

struct Runnable {
  uint64_t priority;  // the smallest runs first
  int thread;
};

// What orders memory accesses in the eyes of TSan. One per block: a variable that two blocks shared would look like
// synchronisation between them. An even and an odd one each, because a fast thread may reach the next barrier before a
// slow one has left this one.
struct BlockTokens {
  char barrier[2];
  struct {
    uint32_t mask;
    unsigned generation;
    char token[2];
  } warp[kMaxWarps][kMaxMasks];
};

struct SharedArray {
  const void* identity;
  void* address;
};

Options read_options() {
  Options o;
  if (const char* seed = std::getenv("ENGRAM_EMULATOR_SEED")) o.seed = std::strtoull(seed, nullptr, 10);
  if (const char* order = std::getenv("ENGRAM_EMULATOR_ORDER")) {
    const char* names[] = {"ascending", "descending", "random", "priority"};
    int i = 0;
    while (i < 4 && std::strcmp(order, names[i])) ++i;
    if (i == 4) throw std::runtime_error("ENGRAM_EMULATOR_ORDER must be ascending, descending, random or priority");
    o.order = static_cast<Order>(i);
  }
  return o;
}

// Everything about the launch in progress; launches are serialised by `launch_mutex`.
struct {
  const char* kernel;
  void (*entry)(void*);
  void* arguments;
  std::vector<Fibre> pool;
  Fibre* fibres;  // of the running block
  Fibre* current;
  int threads, done, at_barrier;
  unsigned barrier_generation;
  int barrier_result;
  Runnable runnable[kMaxThreads];  // a heap
  int runnable_count;
  uint64_t priorities[kMaxThreads];
  uint64_t random_state;
  char error[1024];

  SharedArray arrays[kMaxSharedArrays];
  int array_count;
  size_t shared_bytes;
  void* dynamic;
  BlockTokens* tokens;
  char launch_token, done_token, fence_token;
  char* arena;
  size_t arena_used;

  void* main_stack_pointer;
  void* main_tsan;
  [[maybe_unused]] void* main_fake_stack;
  [[maybe_unused]] const void* main_bottom;
  [[maybe_unused]] size_t main_size;
  Statistics statistics;
} g;
std::mutex launch_mutex;

uint64_t random_number() {  // xorshift64
  g.random_state ^= g.random_state << 13;
  g.random_state ^= g.random_state >> 7;
  g.random_state ^= g.random_state << 17;
  return g.random_state;
}

void release(void* token) {
  if (kTsan) __tsan_release(token);
}
void acquire(void* token) {
  if (kTsan) __tsan_acquire(token);
}

void copy_bytes(void* to, const void* from, size_t n) {
  auto* t = static_cast<volatile unsigned char*>(to);
  auto* f = static_cast<const volatile unsigned char*>(from);
  for (size_t i = 0; i < n; ++i) t[i] = f[i];
}
void fill_bytes(void* to, int value, size_t n) {
  auto* t = static_cast<volatile unsigned char*>(to);
  for (size_t i = 0; i < n; ++i) t[i] = static_cast<unsigned char>(value);
}

// ---- Switching ----

size_t stack_bytes() {
#ifdef __SANITIZE_ADDRESS__
  return options().stack_bytes * 4;
#else
  return options().stack_bytes * (kTsan ? 4 : 1);
#endif
}

void switch_to_scheduler([[maybe_unused]] bool for_good = false) {
  Fibre* self = g.current;
  ++g.statistics.switches;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(for_good ? nullptr : &self->asan_fake_stack, g.main_bottom, g.main_size);
#endif
  if (kTsan) __tsan_switch_to_fiber(g.main_tsan, 1);  // 1: a switch by itself orders nothing
  engram_switch_stack(&self->stack_pointer, g.main_stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(self->asan_fake_stack, nullptr, nullptr);
#endif
}

void switch_to(Fibre& fibre) {
  g.current = &fibre;
  threadIdx = fibre.index;
  ++g.statistics.switches;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&g.main_fake_stack, fibre.stack, stack_bytes());
#endif
  if (kTsan) __tsan_switch_to_fiber(fibre.tsan, 1);
  engram_switch_stack(&g.main_stack_pointer, fibre.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(g.main_fake_stack, nullptr, nullptr);
#endif
}

[[noreturn]] void fail_thread(const char* message) {
  if (!g.error[0]) {
    const uint3 t = g.current->index;
    std::snprintf(g.error, sizeof g.error, "%s [kernel %s, block (%u,%u,%u), thread (%u,%u,%u)]", message, g.kernel,
                  blockIdx.x, blockIdx.y, blockIdx.z, t.x, t.y, t.z);
  }
  for (;;) switch_to_scheduler();
}

void fibre_main() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(g.current->asan_fake_stack, &g.main_bottom, &g.main_size);
#endif
  acquire(&g.launch_token);
  g.entry(g.arguments);
  if (g.current->copies_in_flight) fail_thread("thread returned with asynchronous copies in flight");
  release(&g.done_token);
  g.current->state = State::done;
  ++g.done;
  switch_to_scheduler(true);
}

void start(Fibre& fibre) {
  if (!fibre.stack) {
    void* memory = mmap(nullptr, stack_bytes() + kPage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE))
      throw std::runtime_error("no memory for fibre stacks");
    fibre.stack = static_cast<char*>(memory) + kPage;
  }
  if (kTsan && !fibre.tsan) fibre.tsan = __tsan_create_fiber(0);
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(fibre.stack, stack_bytes());
#endif
  // As engram_switch_stack leaves a stack: six registers, the return address; one slot more for the ABI's alignment.
  void** top = reinterpret_cast<void**>(fibre.stack + stack_bytes()) - 8;
  for (int i = 0; i < 8; ++i) top[i] = nullptr;
  top[6] = reinterpret_cast<void*>(fibre_main);
  fibre.stack_pointer = top;
  fibre.asan_fake_stack = nullptr;
  fibre.copies_in_flight = fibre.copies_uncommitted = fibre.groups_in_flight = 0;
}

void drop_pool() {  // after an error: some fibres are stuck in the middle of their kernel
  for (Fibre& fibre : g.pool) {
    if (fibre.tsan) __tsan_destroy_fiber(fibre.tsan);
    if (fibre.stack) munmap(fibre.stack - kPage, stack_bytes() + kPage);
  }
  g.pool.clear();
}

// ---- Scheduling ----

bool runs_later(const Runnable& a, const Runnable& b) { return a.priority > b.priority; }

void make_runnable(Fibre& fibre) {
  fibre.state = State::ready;
  const uint64_t priority = options().order == Order::random ? random_number() : g.priorities[fibre.thread];
  g.runnable[g.runnable_count++] = {priority, fibre.thread};
  std::push_heap(g.runnable, g.runnable + g.runnable_count, runs_later);
}

Fibre& next_runnable() {
  std::pop_heap(g.runnable, g.runnable + g.runnable_count, runs_later);
  return g.fibres[g.runnable[--g.runnable_count].thread];
}

void draw_priorities() {
  uint64_t warp_priority = 0;
  for (int i = 0; i < g.threads; ++i) {
    switch (options().order) {
      case Order::ascending:
        g.priorities[i] = static_cast<uint64_t>(i);
        break;
      case Order::descending:
        g.priorities[i] = static_cast<uint64_t>(g.threads - i);
        break;
      case Order::random:
        break;
      case Order::priority:
        if (i % kWarp == 0) warp_priority = random_number() << 32;
        g.priorities[i] = warp_priority + (random_number() & 0xffff);
    }
  }
}

std::string describe_deadlock() {
  int count[4] = {};
  std::string stuck;
  for (int i = 0; i < g.threads; ++i) {
    const Fibre& f = g.fibres[i];
    ++count[static_cast<int>(f.state)];
    if (f.state == State::in_warp_operation && stuck.size() < 100) {
      char text[64];
      std::snprintf(text, sizeof text, ", thread %d in %s(mask %#x)", i, f.warp_op_name, f.mask);
      stuck += text;
    }
  }
  char text[320];
  std::snprintf(text, sizeof text,
                "deadlock: of %d threads %d wait at __syncthreads, %d in a warp operation, %d have returned "
                "[kernel %s, block (%u,%u,%u)]",
                g.threads, count[1], count[2], count[3], g.kernel, blockIdx.x, blockIdx.y, blockIdx.z);
  return text + stuck;
}

void run_block() {
  g.done = g.at_barrier = g.runnable_count = 0;
  ++g.statistics.blocks;
  draw_priorities();
  for (int i = 0; i < g.threads; ++i) start(g.fibres[i]);
  for (int i = 0; i < g.threads; ++i) make_runnable(g.fibres[i]);
  release(&g.launch_token);
  while (g.done < g.threads) {
    if (!g.runnable_count) throw std::runtime_error(describe_deadlock());
    switch_to(next_runnable());
    if (g.error[0]) throw std::runtime_error(g.error);
  }
}

// ---- Memory of a block ----

// malloc with the exact size, so that ASan sees overruns. Under TSan instead a part of an arena that is not used again
// in this launch: neither malloc nor reuse may look like something that happened between two blocks.
void* allocate(size_t bytes, size_t alignment, int fill) {
  alignment = std::max<size_t>(alignment, 16);
  void* p = nullptr;
  if (kTsan) {
    g.arena_used = (g.arena_used + alignment - 1) / alignment * alignment;
    p = g.arena + g.arena_used;
    g.arena_used += bytes;
    if (g.arena_used > kArenaBytes) std::abort();
  } else if (posix_memalign(&p, alignment, bytes)) {
    std::abort();
  }
  fill_bytes(p, fill, bytes);
  return p;
}

void free_block() {
  if (!kTsan) {
    for (int i = 0; i < g.array_count; ++i) std::free(g.arrays[i].address);
    std::free(g.dynamic);
    std::free(g.tokens);
  }
  g.array_count = 0;
  g.shared_bytes = 0;
  g.dynamic = nullptr;
  g.tokens = nullptr;
}

void check_launch(dim3 grid, dim3 block, size_t shared_bytes) {
  const auto refuse = [](const char* what) {
    throw std::runtime_error(std::string(what) + " [launch of " + g.kernel + "]");
  };
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads < 1 || threads > kMaxThreads || block.z > 64) refuse("invalid block size");
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    refuse("invalid grid size");
  if (shared_bytes > kMaxSharedBytes) refuse("more than 48 KB of dynamic shared memory");
}

}  // namespace

Options& options() {
  static Options o = read_options();
  return o;
}

Statistics statistics() { return g.statistics; }

void launch_blocks(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*entry)(void*),
                   void* arguments) {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  g.kernel = kernel;
  check_launch(grid, block, shared_bytes);
  gridDim = grid;
  blockDim = block;
  g.entry = entry;
  g.arguments = arguments;
  g.threads = static_cast<int>(block.x * block.y * block.z);
  g.random_state = (options().seed + 1) * 0x9e3779b97f4a7c15ull;
  g.error[0] = 0;
  if (kTsan) {
    g.main_tsan = __tsan_get_current_fiber();
    if (!g.arena) {
      void* memory =
          mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::runtime_error("no memory for the arena of shared memory");
      g.arena = static_cast<char*>(memory);
    }
    g.arena_used = 0;
  }

  struct Position {
    unsigned x, y, z;
  };
  std::vector<Position> order;
  order.reserve(size_t{grid.x} * grid.y * grid.z);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) order.push_back({x, y, z});
  if (options().order == Order::descending) std::reverse(order.begin(), order.end());
  if (options().order >= Order::random)
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_number() % i]);

  // A TSan fibre orders whatever it runs, so that two blocks on the same fibres could not race: blocks take turns.
  const int fibres = std::min(options().tsan_fibres, kMaxTsanFibres);
  const size_t sets = kTsan ? std::clamp<size_t>(fibres / g.threads, 1, order.size()) : 1;
  if (g.pool.size() < sets * g.threads) g.pool.resize(sets * g.threads);
  for (size_t i = 0; i < sets * g.threads; ++i) {
    const unsigned t = static_cast<unsigned>(i % g.threads);
    g.pool[i].thread = static_cast<int>(t);
    g.pool[i].index = {t % block.x, t / block.x % block.y, t / (block.x * block.y)};
  }

  release(&g.launch_token);
  for (size_t i = 0; i < order.size(); ++i) {
    g.fibres = &g.pool[i % sets * g.threads];
    blockIdx = {order[i].x, order[i].y, order[i].z};
    g.tokens = static_cast<BlockTokens*>(allocate(sizeof(BlockTokens), alignof(BlockTokens), 0));
    g.shared_bytes = shared_bytes;
    if (shared_bytes) g.dynamic = allocate(shared_bytes, 128, 0xff);
    try {
      run_block();
    } catch (...) {
      free_block();
      drop_pool();
      throw;
    }
    free_block();
  }
  acquire(&g.done_token);
}

int block_barrier(Barrier kind, int predicate) {
  Fibre& self = *g.current;
  char* token = &g.tokens->barrier[g.barrier_generation & 1];
  self.barrier_kind = kind;
  self.barrier_predicate = predicate;
  release(token);
  if (++g.at_barrier < g.threads) {
    self.state = State::at_barrier;
  } else {
    int count = 0;
    for (int i = 0; i < g.threads; ++i) {
      count += g.fibres[i].barrier_predicate != 0;
      if (g.fibres[i].barrier_kind != kind) fail_thread("threads of a block meet at different kinds of __syncthreads");
    }
    g.barrier_result = kind == Barrier::count ? count : kind == Barrier::all ? count == g.threads : count != 0;
    g.at_barrier = 0;
    ++g.barrier_generation;
    for (int i = 0; i < g.threads; ++i) make_runnable(g.fibres[i]);
  }
  switch_to_scheduler();
  acquire(token);
  return g.barrier_result;
}

void warp_operation(WarpOp op, const char* name, uint32_t mask, const void* in, size_t bytes, int source, void* out) {
  Fibre& self = *g.current;
  const int warp = self.thread / kWarp;
  Fibre* lanes = g.fibres + warp * kWarp;
  const auto named = [mask](int lane) { return (mask >> lane & 1) != 0; };
  const auto refuse = [name](const char* what) {
    char text[256];
    std::snprintf(text, sizeof text, "%s: %s", name, what);
    fail_thread(text);
  };

  if (!named(self.thread % kWarp)) refuse("the calling lane is not in its own mask");
  char* token = nullptr;  // only __syncwarp orders memory
  unsigned* generation = nullptr;
  if (op == WarpOp::sync) {
    int slot = 0;
    auto* masks = g.tokens->warp[warp];
    while (slot < kMaxMasks && masks[slot].mask && masks[slot].mask != mask) ++slot;
    if (slot == kMaxMasks) refuse("too many different masks in one warp for the emulator");
    masks[slot].mask = mask;
    generation = &masks[slot].generation;
    token = &masks[slot].token[*generation & 1];
    release(token);
  }

  self.state = State::in_warp_operation;
  self.warp_op = op;
  self.warp_op_name = name;
  self.mask = mask;
  self.source = source % kWarp;
  copy_bytes(self.in, in, bytes);
  bool complete = true;
  for (int i = 0; i < kWarp; ++i) {
    if (!named(i)) continue;
    if (warp * kWarp + i >= g.threads) refuse("the mask names lanes beyond the block");
    if (lanes[i].state == State::done) refuse("the mask names a lane that has returned");
    if (lanes[i].state != State::in_warp_operation || lanes[i].mask != mask) {
      complete = false;
    } else if (std::strcmp(lanes[i].warp_op_name, name)) {
      char text[128];
      std::snprintf(text, sizeof text, "lanes of one warp meet at another operation, %s", lanes[i].warp_op_name);
      refuse(text);
    }
  }

  if (complete) {
    for (int i = 0; i < kWarp; ++i) {
      if (!named(i)) continue;
      if (op == WarpOp::exchange) {
        if (named(lanes[i].source)) copy_bytes(lanes[i].out, lanes[lanes[i].source].in, bytes);
        else fill_bytes(lanes[i].out, 0xff, bytes);  // undefined in CUDA: NaN here
      } else if (op != WarpOp::sync) {
        uint32_t bits = 0;
        for (int j = 0; j < kWarp; ++j) {
          if (!named(j)) continue;
          const bool bit = op == WarpOp::ballot ? lanes[j].in[0] != 0 : !std::memcmp(lanes[j].in, lanes[i].in, bytes);
          bits |= uint32_t{bit} << j;
        }
        copy_bytes(lanes[i].out, &bits, sizeof bits);
      }
    }
    if (generation) ++*generation;
    for (int i = 0; i < kWarp; ++i)
      if (named(i)) make_runnable(lanes[i]);
  }
  switch_to_scheduler();
  if (token) acquire(token);
  if (out) copy_bytes(out, self.out, op == WarpOp::exchange ? bytes : sizeof(uint32_t));
}

void* shared_array(const void* identity, size_t bytes, size_t alignment) {
  for (int i = 0; i < g.array_count; ++i)
    if (g.arrays[i].identity == identity) return g.arrays[i].address;
  if (g.array_count == kMaxSharedArrays) fail_thread("too many static shared arrays for the emulator");
  g.shared_bytes += bytes;
  if (g.shared_bytes > kMaxSharedBytes) fail_thread("more than 48 KB of shared memory");
  void* address = allocate(bytes, alignment, 0xff);
  g.arrays[g.array_count++] = {identity, address};
  return address;
}

void* dynamic_shared() {
  if (!g.dynamic) fail_thread("dynamic shared memory used, but the launch gave none");
  return g.dynamic;
}

// The data arrives as late as CUDA allows, at the wait; until then the destination holds NaN.
void copy_async(void* to, const void* from, size_t bytes, size_t zero_tail) {
  Fibre& self = *g.current;
  const bool size_ok = (bytes == 4 || bytes == 8 || bytes == 16) && zero_tail <= bytes;
  if (!size_ok || reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
    fail_thread("asynchronous copy of a wrong size or alignment");
  if (self.copies_in_flight == kMaxCopies) fail_thread("too many asynchronous copies in flight for the emulator");
  fill_bytes(to, 0xff, bytes);
  self.copies[self.copies_in_flight++] = {static_cast<char*>(to), static_cast<const char*>(from), bytes, zero_tail};
  ++self.copies_uncommitted;
}

void commit_async() {
  Fibre& self = *g.current;
  if (self.groups_in_flight == kMaxCopies) fail_thread("too many groups of asynchronous copies for the emulator");
  self.groups[self.groups_in_flight++] = self.copies_uncommitted;
  self.copies_uncommitted = 0;
}

void wait_async(int groups_still_in_flight) {
  Fibre& self = *g.current;
  while (self.groups_in_flight > groups_still_in_flight) {
    const int landing = self.groups[0];
    for (int i = 0; i < landing; ++i) {
      const Copy& c = self.copies[i];
      const size_t copied = c.bytes - c.zero_tail;
      if (kTsan) {
        __tsan_write_range(c.to, static_cast<long>(c.bytes));
        __tsan_read_range(const_cast<char*>(c.from), static_cast<long>(copied));
      }
      copy_bytes(c.to, c.from, copied);
      fill_bytes(c.to + copied, 0, c.zero_tail);
    }
    self.copies_in_flight -= landing;
    for (int i = 0; i < self.copies_in_flight; ++i) self.copies[i] = self.copies[i + landing];
    --self.groups_in_flight;
    for (int i = 0; i < self.groups_in_flight; ++i) self.groups[i] = self.groups[i + 1];
  }
}

void device_fence() {
  release(&g.fence_token);
  acquire(&g.fence_token);
}

void fail(const char* message) { fail_thread(message); }

}  // namespace emulator
