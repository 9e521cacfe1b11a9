// Stands before the kernels of engine `cpu`: what memory they take goes through here, where a test has one of them
// denied.  What is given holds NaN everywhere but where zeros were asked for.  Threads are denied too, every other one.

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace denied {

static int64_t next = 0;   // how many asks later one is denied; 0: none
static int64_t bytes = 0;  // what was denied asked for
static int64_t held = 0;   // pieces of memory that were given and did not come back
static bool every_other_thread = false;

static bool denies(size_t size) {
  if (__atomic_load_n(&next, __ATOMIC_RELAXED) == 0 || __atomic_sub_fetch(&next, 1, __ATOMIC_RELAXED) != 0) return false;
  bytes = int64_t(size);
  return true;
}
static void* given(void* made, size_t size, int with) {
  __atomic_add_fetch(&held, 1, __ATOMIC_RELAXED);
  return memset(made, with, size);
}
static void* aligned(size_t to, size_t size) {
  return denies(size) ? nullptr : given(::aligned_alloc(to, size), size, 0xff);
}
static void* any(size_t size) { return denies(size) ? nullptr : given(::malloc(size), size, 0xff); }
static void* zeros(size_t count, size_t size) {
  return denies(count * size) ? nullptr : given(::malloc(count * size), count * size, 0);
}
static void back(void* made) {
  if (made) __atomic_sub_fetch(&held, 1, __ATOMIC_RELAXED);
  ::free(made);
}
static int at_fork(void (*before)(), void (*parent)(), void (*child)()) {
  return denies(1) ? 12 : ::pthread_atfork(before, parent, child);
}
static int thread(pthread_t* made, const pthread_attr_t* how, void* (*function)(void*), void* data) {
  static bool one = false;
  if (every_other_thread && (one = !one)) return 11;
  return ::pthread_create(made, how, function, data);
}

}  // namespace denied

extern "C" {
void denied_next(int64_t count) { denied::next = count, denied::bytes = 0; }
int64_t denied_bytes() { return denied::bytes; }
int64_t denied_held() { return denied::held; }
}

#define aligned_alloc denied::aligned
#define malloc denied::any
#define calloc denied::zeros
#define free denied::back
#define pthread_atfork denied::at_fork
#define pthread_create denied::thread
