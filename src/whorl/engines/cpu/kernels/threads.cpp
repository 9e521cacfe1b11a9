// Threads: one function run by several at once, and a barrier for those that share rows.
//
// With torch's own OpenMP (its GOMP_parallel) where it has one: its threads are awake, and do not fight ours for the
// processor.  OpenMP does not survive a fork, so a child gets threads of its own for the call; so does a torch without.

namespace kernel {

struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread)();
  int (*threads)();
};
static Runtime runtime = {};
static bool forked = false;
static void after_fork() { forked = true; }

struct Job {
  void (*function)(void*, int, int);
  void* data;
  int threads;
};
struct Ticket {
  pthread_t handle;
  pthread_mutex_t* gate;
  Job* job;
  int thread;
};

static void from_openmp(void* data) {
  Job* job = (Job*)data;
  job->function(job->data, runtime.thread(), runtime.threads());
}
static void* from_pthread(void* data) {
  const Ticket& own = *(Ticket*)data;
  pthread_mutex_lock(own.gate), pthread_mutex_unlock(own.gate);
  own.job->function(own.job->data, own.thread, own.job->threads);
  return nullptr;
}

// function(data, thread, threads) by at most so many threads; it must be right with fewer too, and take no memory.
static void parallel(int threads, void (*function)(void*, int, int), void* data) {
  Job job = {function, data, threads};
  if (threads == 1) return function(data, 0, 1);
  if (runtime.parallel && !forked) return runtime.parallel(from_openmp, &job, unsigned(threads), 0);
  Scratch scratch;
  Ticket* tickets = scratch.take<Ticket>(threads);
  // A thread too few would leave a barrier waiting: those that cannot be made are found out before any starts.
  pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&gate);
  int started = 1;
  for (; started < threads; ++started) {
    tickets[started] = {{}, &gate, &job, started};
    if (pthread_create(&tickets[started].handle, nullptr, from_pthread, &tickets[started])) break;
  }
  job.threads = started;
  pthread_mutex_unlock(&gate);
  function(data, 0, started);
  for (int thread = 1; thread < started; ++thread) pthread_join(tickets[thread].handle, nullptr);
}

}  // namespace kernel
