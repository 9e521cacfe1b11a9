// A kernel may begin while the launch ahead of it still runs, and waits for its end, and for all that it wrote, before it
// reads or writes what others do: those of the engine `persistent` before anything else (stream.cu says what it reads
// before).  What is gained is the time from that end to the first instruction.
__device__ __forceinline__ void wait_for_the_launch_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What is launched next may begin when every block of this launch has come here.
__device__ __forceinline__ void let_the_next_launch_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
