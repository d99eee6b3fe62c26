/* A library for LD_PRELOAD that sets the clock of a process 90 s ahead. Compiled by tcc without headers. */
#ifdef __aarch64__
#define CLOCK_GETTIME 113
#else
#define CLOCK_GETTIME 228
#endif
struct timespec { long seconds, nanoseconds; };
long syscall(long number, ...);

int clock_gettime(int clock, struct timespec *now) {
  long result = syscall(CLOCK_GETTIME, clock, now);
  if (clock == 0) now->seconds += 90;
  return (int)result;
}
