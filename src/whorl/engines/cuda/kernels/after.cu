// A kernel may begin while the launch ahead of it still runs: all of whorl's begin by waiting for its end, and for all that
// it wrote.  What is gained is the time from that end to the first instruction.
__device__ __forceinline__ void wait_for_the_launch_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
