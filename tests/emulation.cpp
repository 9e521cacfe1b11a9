// What a CUDA kernel of whorl uses of its GPU, on the host: each thread is a fiber, and what threads do together is done
// by the last of them to come.  It knows clusters, shared memory, mbarriers, mma.sync and ldmatrix; it knows nothing of
// time, caches or the order in which memory becomes visible.  Threads run one after the other, or in an order drawn anew in
// each round, in which warps sleep: then what should be waited for and is not comes too late or is overwritten.
//
// Without headers of C++, which the compiler would read again for each kernel, for as long as the kernel itself takes.
// So what launches, and what warps do together, is compiled once for all of them (OF_LAUNCH), and linked to each
// (OF_KERNEL).
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#ifndef __x86_64__
#include <setjmp.h>
#include <ucontext.h>
#endif

extern "C" {
[[noreturn]] void abort();
void *malloc(size_t), *calloc(size_t, size_t), *realloc(void*, size_t), free(void*);
float cosf(float), erff(float), expf(float), expm1f(float), fabsf(float), fmaxf(float, float), fminf(float, float);
float log1pf(float), logf(float), powf(float, float), sinf(float), sqrtf(float), tanhf(float);
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim { unsigned x, y, z; };

inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned __float_as_uint(float v) { unsigned r; memcpy(&r, &v, 4); return r; }
inline float __uint_as_float(unsigned v) { float r; memcpy(&r, &v, 4); return r; }
inline float __int_as_float(int v) { float r; memcpy(&r, &v, 4); return r; }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
template <class T> inline T __ldg(const T* p) { return *p; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)((both >> 8 * (selector >> 4 * i & 7)) & 0xff) << 8 * i;
  return result;
}

namespace host {

// Stacks begin 17 lines further each, else they are all in the same few places of a cache.
constexpr size_t STACK = (256 << 10) + 17 * 64, SHARED = 232448;

// What lies in zeroed memory.
template <class T>
struct List {
  T* items;
  int count, room;

  void add(const T& item) {
    if (count == room) items = (T*)realloc(items, (room = 2 * room + 8) * sizeof(T));
    items[count++] = item;
  }
  void drop(int first) { memmove(items, items + first, (count -= first) * sizeof(T)); }
  T* begin() { return items; }
  T* end() { return items + count; }
};
struct Barrier { int pending, count; long bytes; unsigned phase; bool waited; };
struct Warp { unsigned given[32][12], taken[32][8]; int came; unsigned turn; };
struct Meeting { int came; unsigned turn; };
struct Block {
  unsigned char shared[SHARED];
  Barrier barriers[SHARED / 8];
  Warp warps[32];
  Meeting meetings[17];
  unsigned rank;
};
// Copies arrive, and products of four warps are computed, when they are waited for, not before.
struct Copy { unsigned char *to, data[16]; int bytes; };
struct Product { float (*sums)[4], (*beside)[4]; int tiles; bool shared, add; uint4 a; unsigned rows, columns; };
// From where a thread goes on.  What libc's jumps do beside takes as long as what a thread does between two of them, and
// longer under AddressSanitizer, which asks the system for each.
#ifdef __x86_64__
typedef void* Place;  // the end of its stack, where its registers lie
extern "C" __attribute__((visibility("hidden"))) void go_on(Place* leave, Place enter);
asm(".text\n.hidden go_on\ngo_on:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp, (%rdi)\n"
    "mov %rsi, %rsp\npop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
inline void begin_at(Place& place, unsigned char* stack, size_t bytes, void (*enter)()) {
  void** const top = (void**)(stack + bytes) - 3;  // as a call leaves it: 8 bytes past a multiple of 16
  *top = nullptr, top[-1] = (void*)enter, place = top - 7;
}
#else
typedef jmp_buf Place;
inline void go_on(Place* leave, Place& enter) {
  if (!_setjmp(*leave)) _longjmp(enter, 1);
}
inline void begin_at(Place& place, unsigned char* stack, size_t bytes, void (*enter)()) {
  static jmp_buf back;
  static Place* its;
  static void (*begins)();
  its = &place, begins = enter;
  if (_setjmp(back)) return;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = stack, start.uc_stack.ss_size = bytes;
  makecontext(&start, (void (*)())+[] {
    if (!_setjmp(*its)) _longjmp(back, 1);
    begins();
  }, 0);
  setcontext(&start);
}
#endif
struct Fiber {
  const unsigned* watched;  // null, or it waits while the bits of `mask` there are `stale`
  unsigned mask, stale;
  unsigned seen;  // how many words had been put as it looked last
  bool looks;     // it waits for words that others put
  bool begun, done;
  Place at;
  unsigned char* stack;
  Block* block;
  dim thread, of_block;
  List<Copy> copies;
  List<Product> products;
  int last;  // the first of those that were begun last
};

#define OF_BOTH __attribute__((visibility("hidden")))
#ifdef OF_KERNEL
#define SHARED_BY_PARTS extern OF_BOTH
#else
#define SHARED_BY_PARTS OF_BOTH
#endif
SHARED_BY_PARTS Place scheduler;
SHARED_BY_PARTS Fiber* now;
SHARED_BY_PARTS Block* blocks;  // of the cluster
SHARED_BY_PARTS Meeting of_cluster;
SHARED_BY_PARTS unsigned threads, in_cluster, puts;
SHARED_BY_PARTS const void* arguments_of_launch;

inline int lane() { return now->thread.x % 32; }
OF_BOTH void yield();
OF_BOTH void wait_while(const unsigned& word, unsigned mask, unsigned stale);
// All lanes give some words; the last to come runs `act` for all.  What it leaves for a lane stays until that comes again.
OF_BOTH unsigned* together(const unsigned* words, int count, void (*act)(Warp&));

inline void come(Meeting& at, int wanted) {
  if (++at.came == wanted) at.came = 0, ++at.turn;
}
inline void meet(Meeting& at, int wanted) {
  const unsigned turn = at.turn;
  come(at, wanted);
  wait_while(at.turn, ~0u, turn);
}

inline unsigned address_of(const void* p) {
  const long at = (const unsigned char*)p - now->block->shared;
  if (at < 0 || at >= (long)SHARED) fprintf(stderr, "no shared address\n"), abort();
  return (unsigned)at;
}
inline Block& block_at(unsigned address) { return address >> 20 ? blocks[(address >> 20) - 1] : *now->block; }
inline unsigned char* at(unsigned address) {
  if ((address & 0xfffff) + 4 > SHARED) fprintf(stderr, "outside shared memory\n"), abort();
  return block_at(address).shared + (address & 0xfffff);
}
inline Barrier& place_of_barrier(unsigned address) {
  if (address % 8 || (address & 0xfffff) >= SHARED) fprintf(stderr, "no barrier can lie there\n"), abort();
  return block_at(address).barriers[(address & 0xfffff) / 8];
}
inline Barrier& barrier_at(unsigned address) {
  Barrier& b = place_of_barrier(address);
  if (b.count == 0) fprintf(stderr, "a barrier is used before its start\n"), abort();
  return b;
}
inline void settle(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) b.pending = b.count, ++b.phase;
}

inline float half_to_float(unsigned short v) {
  const unsigned exponent = v & 0x7c00;
  if (exponent && exponent != 0x7c00) return __uint_as_float((v & 0x8000u) << 16 | ((v & 0x7fffu) << 13) + (112u << 23));
  _Float16 h;
  memcpy(&h, &v, 2);
  return (float)h;
}
inline unsigned short float_to_half(float v) { const _Float16 h = (_Float16)v; unsigned short r; memcpy(&r, &h, 2); return r; }
inline float bfloat_to_float(unsigned short v) { return __uint_as_float((unsigned)v << 16); }
inline unsigned short float_to_bfloat(float v) {
  const unsigned bits = __float_as_uint(v);
  if (v != v) return 0x7fff;
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace host

#define threadIdx (host::now->thread)
#define blockIdx (host::now->of_block)
inline dim grid_of_launch;
#define gridDim grid_of_launch

inline void __syncthreads() { host::meet(host::now->block->meetings[0], (int)host::threads); }
OF_BOTH void __syncwarp();
OF_BOTH unsigned shuffle_words(unsigned value, int apart);
inline unsigned __shfl_xor_sync(unsigned, unsigned value, int apart) { return shuffle_words(value, apart); }
inline float __shfl_xor_sync(unsigned, float value, int apart) {
  return __uint_as_float(shuffle_words(__float_as_uint(value), apart));
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }
OF_BOTH unsigned __ballot_sync(unsigned, bool value);
OF_BOTH unsigned __reduce_max_sync(unsigned, unsigned value);
inline bool __all_sync(unsigned, bool value) { return __ballot_sync(~0u, value) == ~0u; }
inline bool __any_sync(unsigned, bool value) { return __ballot_sync(~0u, value) != 0; }
inline unsigned __shfl_sync(unsigned, unsigned value, int from) { return shuffle_words(value, host::lane() ^ from); }
inline int __shfl_sync(unsigned, int value, int from) { return shuffle_words(value, host::lane() ^ from); }
inline float __shfl_sync(unsigned, float value, int from) {
  return __uint_as_float(shuffle_words(__float_as_uint(value), host::lane() ^ from));
}

// --- in the place of what ptx.cu says in PTX ------------------------------------------------------------------------------

inline void emulated_wait_for_the_launch_before() {}
inline void emulated_let_the_next_launch_begin() {}
inline unsigned emulated_spread_signs(unsigned bytes, unsigned which) {
  unsigned result = 0;
  for (int byte = 0; byte < 4; ++byte) {
    const unsigned from = which >> 4 * byte & 0xf;  // from 8 on, the sign of the byte 8 less
    result |= (bytes >> (8 * (from - 8) + 7) & 1 ? 0xffu : 0u) << 8 * byte;
  }
  return result;
}
#if ELEMENT_BYTES == 2
#if BFLOAT16
inline float emulated_wide(unsigned short v) { return host::bfloat_to_float(v); }
inline unsigned short emulated_narrow(float v) { return host::float_to_bfloat(v); }
#else
inline float emulated_wide(unsigned short v) { return host::half_to_float(v); }
inline unsigned short emulated_narrow(float v) { return host::float_to_half(v); }
#endif
inline unsigned emulated_narrow_pair(float low, float high) {
  return emulated_narrow(low) | (unsigned)emulated_narrow(high) << 16;
}
inline float operand_value(unsigned word, int half) { return emulated_wide((unsigned short)(word >> 16 * half)); }
inline unsigned emulated_times(unsigned a, unsigned b) {
  return emulated_narrow_pair(operand_value(a, 0) * operand_value(b, 0), operand_value(a, 1) * operand_value(b, 1));
}
constexpr int IN_WORD = 2;  // elements
#else
inline unsigned emulated_high_of(unsigned v) { return v + 0x1000 & 0xffffe000u; }
inline unsigned emulated_to_tf32(float v) { return emulated_high_of(__float_as_uint(v)); }
inline unsigned emulated_times(unsigned a, unsigned b) { return __float_as_uint(__uint_as_float(a) * __uint_as_float(b)); }
#if HALVES
inline unsigned emulated_half_pair(float low, float high) {
  return host::float_to_half(low) | (unsigned)host::float_to_half(high) << 16;
}
inline unsigned emulated_times_pair(unsigned pair, unsigned factors) {
  const auto times = [&](int bit) {
    return (unsigned)host::float_to_half(host::half_to_float((unsigned short)(pair >> bit)) * host::half_to_float((unsigned short)(factors >> bit)));
  };
  return times(0) | times(16) << 16;
}
inline float emulated_low_half(unsigned pair) { return host::half_to_float((unsigned short)pair); }
inline float operand_value(unsigned word, int half) { return host::half_to_float((unsigned short)(word >> 16 * half)); }
constexpr int IN_WORD = 2;
#else
inline float operand_value(unsigned word, int) { return __uint_as_float(word & 0xffffe000u); }  // cut off, not rounded
constexpr int IN_WORD = 1;
#endif
#endif
inline unsigned __cvta_generic_to_shared(const void* p) { return host::address_of(p); }
OF_BOTH void emulated_multiply_words(float (&sums)[4], const uint4& a, const uint2& b);
OF_BOTH void emulated_add_products(float (&sums)[4], const uint4& a, const uint2& b);
inline unsigned emulated_two_bfloat16(float low, float high) {
  return host::float_to_bfloat(low) | (unsigned)host::float_to_bfloat(high) << 16;
}
OF_BOTH uint4 load_matrices(unsigned address, int count);
inline uint4 emulated_load_columns(unsigned address) { return load_matrices(address, 4); }
inline uint4 emulated_load_half_columns(unsigned address) { return load_matrices(address, 2); }
inline uint2 emulated_product(unsigned a, unsigned b) {
  const uint64_t all = (uint64_t)a * b;
  return {(unsigned)all, (unsigned)(all >> 32)};
}
inline unsigned emulated_load_mark(const bool* global, bool there) { return there ? *global : 0u; }
inline void emulated_prefetch(const void*) {}
template <int TILES>
inline void emulated_multiply_columns(float (&sums)[TILES][4], const uint4& a, unsigned columns, bool add) {
  host::now->products.add({sums, nullptr, TILES, false, add, a, 0, columns});
}
template <int TILES>
inline void emulated_multiply_both_columns(
    float (&sums)[TILES][4], float (&second)[TILES][4], const uint4& a, unsigned columns, bool add) {
  host::now->products.add({sums, second, TILES, false, add, a, 0, columns});
}
template <int TILES>
inline void emulated_multiply_both_shared(
    float (&sums)[TILES][4], float (&second)[TILES][4], unsigned rows, unsigned columns, bool add) {
  host::now->products.add({sums, second, TILES, true, add, {}, rows, columns});
}
template <int TILES>
inline void emulated_multiply_shared(float (&sums)[TILES][4], unsigned rows, unsigned columns, bool add) {
  host::now->products.add({sums, nullptr, TILES, true, add, {}, rows, columns});
}
inline void emulated_show_products() {}
inline void emulated_begin_products() { host::now->last = host::now->products.count; }
inline void emulated_end_products() {}
OF_BOTH void multiply_first(int count);
inline void emulated_multiplied() { multiply_first(host::now->products.count); }
inline void emulated_multiplied_but_the_last() { multiply_first(host::now->last); }
inline void copy(unsigned to, const void* from, bool there, int bytes) {
  if ((size_t)from % bytes || to % bytes) fprintf(stderr, "an address of a copy is odd\n"), abort();
  host::Copy made = {host::at(to), {}, bytes};
  if (there) memcpy(made.data, from, bytes);
  host::now->copies.add(made);
}
inline void emulated_copy_16(unsigned to, const void* from, bool there) { copy(to, from, there, 16); }
inline void emulated_copy_8(unsigned to, const void* from, bool there) { copy(to, from, there, 8); }
inline void emulated_copy_4(unsigned to, const void* from, bool there) { copy(to, from, there, 4); }
inline void emulated_copies_done() {
  for (const host::Copy& made : host::now->copies) memcpy(made.to, made.data, made.bytes);
  host::now->copies.count = 0;
}
inline void emulated_named_barrier(int id, int count) { host::meet(host::now->block->meetings[id], count); }
inline void emulated_arrive_at_barrier(int id, int count) { host::come(host::now->block->meetings[id], count); }
inline float emulated_fast_tanh(float v) { return tanhf(v); }
inline float emulated_fast_exp(float v) { return expf(v); }
inline float emulated_fast_log(float v) { return logf(v); }
inline float emulated_reciprocal(float v) { return 1.f / v; }
inline unsigned emulated_rank_in_cluster() { return host::now->block->rank; }
inline unsigned emulated_at_rank(unsigned address, unsigned rank) { return (address & 0xfffff) | (rank + 1) << 20; }
inline void emulated_cluster_barrier() { host::meet(host::of_cluster, (int)(host::threads * host::in_cluster)); }
inline void emulated_start_barrier(unsigned barrier, unsigned arrivals) {
  host::place_of_barrier(barrier) = {(int)arrivals, (int)arrivals, 0, 0, false};
}
inline void emulated_arrive_here(unsigned barrier) {
  --host::barrier_at(barrier).pending;
  host::settle(host::barrier_at(barrier));
}
inline void emulated_barriers_started() {}
inline void emulated_expect(unsigned barrier, unsigned bytes) {
  host::Barrier& b = host::barrier_at(barrier);
  if (bytes == 0 && b.waited) fprintf(stderr, "a phase of no bytes may be over before all saw the one before\n"), abort();
  b.bytes += bytes, --b.pending;
  host::settle(b);
}
inline void emulated_wait(unsigned barrier, unsigned phase) {
  host::Barrier& b = host::barrier_at(barrier);
  b.waited = true;
  host::wait_while(b.phase, 1, phase);
}
inline void emulated_send(unsigned address, unsigned barrier, uint4 data) {
  memcpy(host::at(address), &data, 16);
  host::Barrier& b = host::barrier_at(barrier);
  b.bytes -= 16;
  host::settle(b);
}
inline void emulated_send_pair(unsigned address, unsigned barrier, uint2 data) {
  memcpy(host::at(address), &data, 8);
  host::Barrier& b = host::barrier_at(barrier);
  b.bytes -= 8;
  host::settle(b);
}
inline void emulated_send_word(unsigned address, unsigned barrier, unsigned data) {
  memcpy(host::at(address), &data, 4);
  host::Barrier& b = host::barrier_at(barrier);
  b.bytes -= 4;
  host::settle(b);
}
inline void emulated_take_more_registers() {}
inline void emulated_take_fewer_registers() {}

// --- in the place of what exchange.cu says in PTX: who looks lets all others run first, and looks again once something was put -

inline void look() {
  host::now->looks = true;
  host::yield();
  host::now->looks = false, host::now->seen = host::puts;
}
inline uint4 emulated_look(const unsigned* at) {
  look();
  return {at[0], at[1], at[2], at[3]};
}
inline uint2 emulated_look_pair(const unsigned* at) {
  look();
  return {at[0], at[1]};
}
inline void emulated_put(unsigned* at, unsigned word) { *at = word, ++host::puts; }
inline void emulated_put_pair(unsigned* at, unsigned first, unsigned second) { at[0] = first, at[1] = second, ++host::puts; }
inline void emulated_fence() {}

// --- and of sides.cu: blocks do not lie on multiprocessors in their order

inline unsigned emulated_count_up(unsigned* at) { return ++host::puts, ++*at; }
inline unsigned emulated_counted(const unsigned* at) {
  look();
  return *at + 1;
}
inline unsigned emulated_multiprocessor() { return blockIdx.x * 7 % gridDim.x; }

template <class T>
inline void emulated_keep(T&) {}
inline unsigned emulated_ticks() { return 0; }
inline void emulated_pause(unsigned, unsigned) {}
inline void emulated_ready(float&) {}
inline void emulated_ready(unsigned&) {}

extern "C" __attribute__((visibility("hidden"))) void enter();  // what a thread does

#ifndef OF_LAUNCH
//: kernel

void enter() {
  KERNEL(*(const Arguments*)host::arguments_of_launch);
  host::now->done = true;
  host::yield();
}
#endif

#ifndef OF_KERNEL

// Lets a thread run until it yields.
inline void resume(host::Fiber& f) {
  host::now = &f;
  if (!f.begun) host::begin_at(f.at, f.stack, host::STACK, enter);
  f.begun = true;
  host::go_on(&host::scheduler, f.at);
}
void host::yield() { go_on(&now->at, scheduler); }
inline bool waits(const host::Fiber& f) { return f.watched && (*f.watched & f.mask) == f.stale; }
void host::wait_while(const unsigned& word, unsigned mask, unsigned stale) {
  now->watched = &word, now->mask = mask, now->stale = stale;
  while (waits(*now)) yield();
  now->watched = nullptr;
}
unsigned* host::together(const unsigned* words, int count, void (*act)(Warp&)) {
  Warp& warp = now->block->warps[now->thread.x / 32];
  for (int i = 0; i < count; ++i) warp.given[lane()][i] = words[i];
  const unsigned turn = warp.turn;
  if (++warp.came == 32) act(warp), warp.came = 0, ++warp.turn;
  else wait_while(warp.turn, ~0u, turn);
  return warp.taken[lane()];
}
void __syncwarp() { host::together(nullptr, 0, [](host::Warp&) {}); }
unsigned shuffle_words(unsigned value, int apart) {
  const unsigned words[2] = {value, (unsigned)apart};
  return host::together(words, 2, [](host::Warp& w) {
    for (int l = 0; l < 32; ++l) w.taken[l][0] = w.given[l ^ w.given[l][1]][0];
  })[0];
}
unsigned __ballot_sync(unsigned, bool value) {
  const unsigned word = value;
  return host::together(&word, 1, [](host::Warp& w) {
    unsigned bits = 0;
    for (int l = 0; l < 32; ++l) bits |= w.given[l][0] << l;
    for (int l = 0; l < 32; ++l) w.taken[l][0] = bits;
  })[0];
}
unsigned __reduce_max_sync(unsigned, unsigned value) {
  return host::together(&value, 1, [](host::Warp& w) {
    unsigned most = 0;
    for (int l = 0; l < 32; ++l) most = w.given[l][0] > most ? w.given[l][0] : most;
    for (int l = 0; l < 32; ++l) w.taken[l][0] = most;
  })[0];
}

struct Operands {
  float left[16][8 * IN_WORD], right[8 * IN_WORD][8];

  void take_left(int lane, unsigned a, unsigned b, unsigned c, unsigned d) {
    for (int half = 0; half < IN_WORD; ++half) {
      const int k = lane % 4 * IN_WORD + half, far = k + 4 * IN_WORD;
      left[lane / 4][k] = operand_value(a, half), left[lane / 4 + 8][k] = operand_value(b, half);
      left[lane / 4][far] = operand_value(c, half), left[lane / 4 + 8][far] = operand_value(d, half);
    }
  }
  void take_right(int lane, unsigned a, unsigned b) {
    for (int half = 0; half < IN_WORD; ++half) {
      const int k = lane % 4 * IN_WORD + half;
      right[k][lane / 4] = operand_value(a, half), right[k + 4 * IN_WORD][lane / 4] = operand_value(b, half);
    }
  }
  void add_to(float (&sums)[16][8]) const {  // in the order of k
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 8 * IN_WORD; ++k)
        for (int column = 0; column < 8; ++column) sums[row][column] += left[row][k] * right[k][column];
  }
};
inline float& of_lane(float (&sums)[16][8], int lane, int i) { return sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]; }
void emulated_multiply_words(float (&sums)[4], const uint4& a, const uint2& b) {
  unsigned words[10] = {a.x, a.y, a.z, a.w, b.x, b.y};
  memcpy(words + 6, sums, 16);
  const unsigned* const taken = host::together(words, 10, [](host::Warp& w) {
    Operands all;
    float added[16][8];
    for (int l = 0; l < 32; ++l) {
      const unsigned* const given = w.given[l];
      all.take_left(l, given[0], given[1], given[2], given[3]), all.take_right(l, given[4], given[5]);
      for (int i = 0; i < 4; ++i) of_lane(added, l, i) = __uint_as_float(given[6 + i]);
    }
    all.add_to(added);
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) w.taken[l][i] = __float_as_uint(of_lane(added, l, i));
  });
  memcpy(sums, taken, 16);
}
void emulated_add_products(float (&sums)[4], const uint4& a, const uint2& b) {
  unsigned words[10] = {a.x, a.y, a.z, a.w, b.x, b.y};
  memcpy(words + 6, sums, 16);
  const unsigned* const taken = host::together(words, 10, [](host::Warp& w) {
    const auto value = [&](int lane, int word, int half) {
      return host::bfloat_to_float((unsigned short)(w.given[lane][word] >> 16 * half));
    };
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        const int row = l / 4, column = l % 4 * 2 + i % 2, lower = i / 2;
        float sum = __uint_as_float(w.given[l][6 + i]);
        for (int k = 0; k < 16; ++k)
          sum += value(row * 4 + k % 8 / 2, lower + k / 8 * 2, k % 2) * value(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
        w.taken[l][i] = __float_as_uint(sum);
      }
  });
  memcpy(sums, taken, 16);
}
uint4 load_matrices(unsigned address, int count) {
  const unsigned words[2] = {address, (unsigned)count};
  const unsigned* const taken = host::together(words, 2, [](host::Warp& w) {
    for (int l = 0; l < 32; ++l)
      for (unsigned m = 0; m < 4; ++m)
        w.taken[l][m] = m < w.given[l][1] ? *(unsigned*)host::at(w.given[m * 8 + l / 4][0] + l % 4 * 4) : 0;
  });
  return {taken[0], taken[1], taken[2], taken[3]};
}
inline unsigned word_at(unsigned operand, int row, int word) {
  const unsigned address = (operand & 0x3fff) << 4, across = (operand >> 16 & 0x3fff) << 4;
  return *(unsigned*)host::at(address + word / 4 * across + row * 16 + word % 4 * 4);
}
// Of products of four warps each warp has its own 16 rows.
void multiply_first(int count) {
  for (int place = 0; place < count; ++place)
    host::together((unsigned*)&place, 1, [](host::Warp& w) {
      const host::Fiber* const lanes = host::now - host::lane();
      const auto of = [&](int l) -> const host::Product& { return lanes[l].products.items[w.given[l][0]]; };
      Operands all;
      for (int l = 0; l < 32; ++l) {
        const host::Product& made = of(l);
        const int row = (int)host::now->thread.x / 32 % 4 * 16 + l / 4, word = l % 4;
        if (!made.shared) all.take_left(l, made.a.x, made.a.y, made.a.z, made.a.w);
        else
          all.take_left(l, word_at(made.rows, row, word), word_at(made.rows, row + 8, word),
                        word_at(made.rows, row, word + 4), word_at(made.rows, row + 8, word + 4));
      }
      for (int n = 0, tiles = of(0).tiles; n < tiles * (of(0).beside ? 2 : 1); ++n) {
        const auto sums_of = [&](int l) { return n < tiles ? of(l).sums[n] : of(l).beside[n - tiles]; };
        float added[16][8];
        for (int l = 0; l < 32; ++l) {
          const int row = n * 8 + l / 4, word = l % 4;
          all.take_right(l, word_at(of(l).columns, row, word), word_at(of(l).columns, row, word + 4));
          for (int i = 0; i < 4; ++i) of_lane(added, l, i) = of(l).add ? sums_of(l)[i] : 0.f;
        }
        all.add_to(added);
        for (int l = 0; l < 32; ++l)
          for (int i = 0; i < 4; ++i) sums_of(l)[i] = of_lane(added, l, i);
      }
    });
  host::now->products.drop(count);
}

extern "C" {
uint64_t order_of_threads;  // 0: one after the other; else the generator's next number
uint64_t bytes_of_stack = host::STACK;
}
inline unsigned drawn(unsigned below) {
  order_of_threads = order_of_threads * 6364136223846793005u + 1442695040888963407u;
  return (unsigned)((order_of_threads >> 32) * below >> 32);
}

// `shared`: bytes of a block's shared memory; `stacks`: room for those of a cluster's threads, which a launch leaves as
// they are.  0: all is well, 1: threads wait for each other, 2: who has less wrote to more.
extern "C" int launch(
    unsigned grid, unsigned second, unsigned block, unsigned cluster, unsigned shared, const void* arguments,
    unsigned char* stacks) {
  host::arguments_of_launch = arguments, grid_of_launch = {grid, second, 1}, host::threads = block, host::in_cluster = cluster;
  const unsigned all = block * cluster;
  bool over = true, within = true;
  for (unsigned y = 0; over && y < second; ++y)
    for (unsigned first = 0; over && first < grid; first += cluster) {
      host::blocks = (host::Block*)calloc(cluster, sizeof(host::Block));
      host::Fiber* const fibers = (host::Fiber*)calloc(all, sizeof(host::Fiber));
      host::of_cluster = {};
      for (unsigned rank = 0; rank < cluster; ++rank) {
        memset(host::blocks[rank].shared, 0xff, host::SHARED);
        host::blocks[rank].rank = rank;
      }
      for (unsigned i = 0; i < all; ++i) {
        host::Fiber& f = fibers[i];
        f.stack = stacks + host::STACK * i, f.block = &host::blocks[i / block];
        f.thread = {i % block, 0, 0}, f.of_block = {first + i / block, y, 0};
      }
      // What sleeps: any warps; single threads, which a GPU too may let go on one after the other; or for all of the launch
      // one warp, or one block, that runs a little where all others wait for it, or have looked for it long.
      enum { WARPS, SINGLE, ONE_WARP, ONE_BLOCK };
      const bool any = order_of_threads != 0;
      const unsigned how = any ? drawn(4) : WARPS, alike = how == SINGLE ? 1 : how == ONE_BLOCK ? block : 32;
      const unsigned sleepers = (all + alike - 1) / alike, late = any ? drawn(sleepers) : 0;
      unsigned left = all, *const asleep = (unsigned*)calloc(sleepers, sizeof(unsigned));
      bool ran = true, again = false;  // again: none has anything to do but to look
      auto puts = host::puts;
      unsigned in_vain = 0;  // times that all looked since anything was put
      for (int idle = 0; left && ran && idle <= 4000000 && in_vain <= 20000; ++idle) {
        ran = false;
        const unsigned far = 16411 % all;  // a prime that is larger than the number of threads: it meets each
        const unsigned begin = any ? drawn(all) : 0, apart = !any ? 1 : drawn(2) ? far : all - far;
        bool slept = false, looks = false;
        for (unsigned n = 0, i = begin; n < all; ++n, i = i + apart < all ? i + apart : i + apart - all) {
          if (fibers[i].done || waits(fibers[i])) continue;
          if (fibers[i].looks && fibers[i].seen == host::puts && !again) {  // it would find what it found
            looks = true;
            continue;
          }
          if (asleep[i / alike]) {
            slept = true;
            continue;
          }
          ran = true, resume(fibers[i]);
          if (fibers[i].done) --left, idle = 0;
        }
        for (unsigned one = 0; any && one < sleepers; ++one)  // some sleep for long, but not where all others wait
          if (asleep[one]) asleep[one] = ran ? asleep[one] - 1 : 0;
          else if (how == WARPS && drawn(16) == 0) asleep[one] = drawn(64);
          else if (how >= ONE_WARP && one == late) asleep[one] = 20;
        if (any && how == SINGLE) asleep[drawn(all)] = drawn(64);  // a few at once: others soon wait for each
        again = looks && !ran && !slept;
        if (again) in_vain = puts == host::puts ? in_vain + 1 : 0, puts = host::puts;
        ran = ran || slept || looks;
      }
      over = left == 0;  // else they wait for each other
      for (unsigned rank = 0; shared < host::SHARED && rank < cluster; ++rank) {
        const unsigned char* const rest = host::blocks[rank].shared + shared;
        within &= *rest == 0xff && memcmp(rest, rest + 1, host::SHARED - shared - 1) == 0;  // each is as the one before
      }
      for (unsigned i = 0; i < all; ++i) free(fibers[i].copies.items), free(fibers[i].products.items);
      free(fibers), free(asleep), free(host::blocks);
    }
  return !over ? 1 : !within ? 2 : 0;
}
#endif
