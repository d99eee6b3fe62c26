/* A libcuda.so.1 that answers what the launcher asks: https://docs.nvidia.com/cuda/cuda-driver-api/
 *
 * Compiled by tests/fakes/cuda_driver.py without headers, with these macros:
 *   CUDA_VERSION  what cuDriverGetVersion answers, such as 13020
 *   INIT          what cuInit returns
 *   HANGS         1: cuInit does not return
 *   CRASHES       1: cuInit is killed by a signal
 *   GPUS          initializers of GPUs: {7, 0, "Tesla V100-SXM2-16GB"},
 */
char *getenv(const char *name);
int pause(void);
void abort(void);

typedef int CUresult;
typedef int CUdevice;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_NOT_INITIALIZED = 3, CUDA_ERROR_NO_DEVICE = 100,
       CUDA_ERROR_INVALID_DEVICE = 101 };
enum { CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76 };

static const struct {
  int major, minor;
  const char *name;
} present[] = {GPUS {0, 0, 0}};

#define PRESENT ((int)(sizeof present / sizeof present[0]) - 1)
/* Handles are not the ordinal numbers, so that a caller that takes one for the other fails. */
#define FIRST_HANDLE 40

static int visible[64], count, initialized;

/* Number the GPUs of CUDA_VISIBLE_DEVICES anew; the first invalid entry and those after it are ignored. */
static void select_visible(void) {
  const char *word = getenv("CUDA_VISIBLE_DEVICES");
  int index;
  if (!word) {
    for (index = 0; index < PRESENT; index++) visible[count++] = index;
    return;
  }
  while (*word >= '0' && *word <= '9') {
    for (index = 0; *word >= '0' && *word <= '9'; word++) index = index * 10 + *word - '0';
    if (index >= PRESENT) return;
    visible[count++] = index;
    if (*word == ',') word++;
  }
}

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  while (HANGS) pause();
  if (CRASHES) abort();
  if (INIT) return INIT;
  select_visible();
  initialized = 1;
  return count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDeviceGetCount(int *number) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  *number = count;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= count) return CUDA_ERROR_INVALID_DEVICE;
  *device = FIRST_HANDLE + ordinal;
  return CUDA_SUCCESS;
}

static int gpu_of(CUdevice device) {
  int ordinal = device - FIRST_HANDLE;
  return initialized && ordinal >= 0 && ordinal < count ? visible[ordinal] : -1;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  int gpu = gpu_of(device);
  if (gpu < 0) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) *value = present[gpu].major;
  else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) *value = present[gpu].minor;
  else return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  int gpu = gpu_of(device), index = 0;
  if (gpu < 0) return CUDA_ERROR_INVALID_DEVICE;
  for (; index < length - 1 && present[gpu].name[index]; index++) name[index] = present[gpu].name[index];
  name[index] = 0;
  return CUDA_SUCCESS;
}
