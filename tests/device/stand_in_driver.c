/* Stand-in for libcuda.so.1: the functions that `nano_inference.device.driver` calls, with the types
 * of cuda.h, over this process's memory. Addresses are reserved without access, memory is an
 * anonymous file, and reading an unmapped address is a fault. Copies are done by the second query of
 * their stream, so that a caller that does not wait gets no data. */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GRANULE = 1 << 16, MOST = 4096 };
typedef struct { int file, mappings, held; size_t size; } Memory;
typedef struct { CUdeviceptr address; size_t size; int memory; } Mapping;
typedef struct { void *to; const void *from; size_t size; } Copy;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Memory memories[MOST];
static Mapping mappings[MOST], ranges[MOST];
static Copy copies[MOST];
static int num_copies, asked, supported = 1;
static size_t total = (size_t)1 << 28, used, others, pinned, most_pinned = (size_t)1 << 40;
static __thread int depth;  /* contexts that this thread has pushed */
/* the call that fails: `left` more calls of any name succeed */
static long left = -1, num_calls;
static CUresult fault;

static int fails(void) {
  num_calls++;
  return left >= 0 && left-- == 0;
}
#define BEGIN_FREE(needs_context)                                   \
  pthread_mutex_lock(&lock);                                        \
  CUresult result = CUDA_SUCCESS;                                   \
  if ((needs_context) && !depth) result = CUDA_ERROR_INVALID_CONTEXT
#define BEGIN                                                       \
  BEGIN_FREE(1);                                                    \
  if (result == CUDA_SUCCESS && fails()) result = fault;            \
  if (result == CUDA_SUCCESS)
#define END                                                         \
  pthread_mutex_unlock(&lock);                                      \
  return result

/* for tests */
void stand_in_fail(long after, int code) { left = after; fault = (CUresult)code; }
long stand_in_calls(void) { return num_calls; }
void stand_in_card(size_t size, size_t by_others, int has) { total = size; others = by_others; supported = has; }
void stand_in_host(size_t most) { most_pinned = most; }
size_t stand_in_used(void) { return used; }
size_t stand_in_pinned(void) { return pinned; }
int stand_in_ranges(void) {
  int count = 0;
  for (int i = 0; i < MOST; i++) count += ranges[i].size != 0;
  return count;
}

CUresult CUDAAPI cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute != CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED || device) return CUDA_ERROR_INVALID_VALUE;
  *value = supported;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)memories;
  return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  if (context != (CUcontext)memories) return CUDA_ERROR_INVALID_CONTEXT;
  depth++;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxPopCurrent(CUcontext *context) {
  if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
  depth--;
  *context = (CUcontext)memories;
  return CUDA_SUCCESS;
}

static void copy_all(void) {
  for (int i = 0; i < num_copies; i++) memcpy(copies[i].to, copies[i].from, copies[i].size);
  num_copies = asked = 0;
}

CUresult CUDAAPI cuCtxSynchronize(void) {
  BEGIN copy_all();
  END;
}
CUresult CUDAAPI cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  BEGIN_FREE(1);
  *total_bytes = total;
  *free_bytes = total - used > others ? total - used - others : 0;
  END;
}

static int is_on_card(const CUmemLocation *location) {
  return location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id == 0;
}
static int is_allocation(const CUmemAllocationProp *p) {
  return p->type == CU_MEM_ALLOCATION_TYPE_PINNED && p->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE &&
         is_on_card(&p->location) && p->win32HandleMetaData == NULL && p->allocFlags.compressionType == 0 &&
         p->allocFlags.gpuDirectRDMACapable == 0 && p->allocFlags.usage == 0;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(
    size_t *granularity, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags option) {
  *granularity = GRANULE;
  return is_allocation(p) && option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static Mapping *entry(Mapping *table, CUdeviceptr address, size_t size) {
  for (int i = 0; i < MOST; i++)
    if (table[i].size == size && table[i].address == address) return &table[i];
  return NULL;
}
static Mapping *covering(Mapping *table, CUdeviceptr address, size_t size) {
  for (int i = 0; i < MOST; i++)
    if (table[i].size && address >= table[i].address && address + size <= table[i].address + table[i].size)
      return &table[i];
  return NULL;
}
static int overlaps(Mapping *table, CUdeviceptr address, size_t size) {
  for (int i = 0; i < MOST; i++)
    if (table[i].size && address < table[i].address + table[i].size && table[i].address < address + size) return 1;
  return 0;
}
static int no_access(CUdeviceptr address, size_t size, int fixed) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (fixed ? MAP_FIXED : 0);
  return mmap((void *)address, size, PROT_NONE, flags, -1, 0) != MAP_FAILED;
}
static void drop(Memory *memory) {
  if (memory->held || memory->mappings || !memory->size) return;
  used -= memory->size;
  close(memory->file);
  memory->size = 0;
}

CUresult CUDAAPI cuMemAddressReserve(
    CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
  BEGIN {
    Mapping *range = entry(ranges, 0, 0);
    char *first = mmap(NULL, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!size || size % GRANULE || alignment || wish || flags || !range || first == MAP_FAILED)
      result = CUDA_ERROR_INVALID_VALUE;
    else {
      *address = ((CUdeviceptr)first + GRANULE - 1) / GRANULE * GRANULE;
      *range = (Mapping){*address, size, 0};
    }
  }
  END;
}
CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
  BEGIN {
    Mapping *range = entry(ranges, address, size);
    if (!range || overlaps(mappings, address, size)) result = CUDA_ERROR_INVALID_VALUE;
    else *range = (Mapping){0};
  }
  END;
}
CUresult CUDAAPI cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p, unsigned long long flags) {
  BEGIN {
    if (!size || size % GRANULE || !is_allocation(p) || flags) result = CUDA_ERROR_INVALID_VALUE;
    else if (used + others + size > total) result = CUDA_ERROR_OUT_OF_MEMORY;
    else {
      Memory *memory = NULL;
      for (int i = 0; i < MOST && !memory; i++) memory = memories[i].size ? NULL : &memories[i];
      memory->file = memfd_create("card", 0);
      if (ftruncate(memory->file, (off_t)size)) abort();
      /* new memory has the contents of its last owner */
      char *content = mmap(NULL, size, PROT_WRITE, MAP_SHARED, memory->file, 0);
      memset(content, 0x5a, size);
      munmap(content, size);
      memory->size = size;
      memory->mappings = 0;
      memory->held = 1;
      used += size;
      *handle = (CUmemGenericAllocationHandle)(memory - memories) + 1;
    }
  }
  END;
}
CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  BEGIN_FREE(1);
  Memory *memory = &memories[handle - 1];
  if (!handle || handle > MOST || !memory->size || !memory->held) result = CUDA_ERROR_INVALID_VALUE;
  else {
    memory->held = 0;
    drop(memory);
  }
  END;
}
CUresult CUDAAPI cuMemMap(
    CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  BEGIN {
    Memory *memory = &memories[handle - 1];
    Mapping *mapping = entry(mappings, 0, 0);
    if (address % GRANULE || offset || flags || !handle || handle > MOST || memory->size != size || !mapping ||
        !covering(ranges, address, size) || overlaps(mappings, address, size) ||
        mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file, 0) == MAP_FAILED)
      result = CUDA_ERROR_INVALID_VALUE;
    else {
      memory->mappings++;
      *mapping = (Mapping){address, size, (int)(memory - memories)};
    }
  }
  END;
}
CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
  BEGIN {
    if (count != 1 || !is_on_card(&access->location) || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
        !entry(mappings, address, size) || mprotect((void *)address, size, PROT_READ | PROT_WRITE))
      result = CUDA_ERROR_INVALID_VALUE;
  }
  END;
}
CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) {
  BEGIN {
    Mapping *mapping = entry(mappings, address, size);
    if (!size || !mapping || !no_access(address, size, 1)) result = CUDA_ERROR_INVALID_VALUE;
    else {
      Memory *memory = &memories[mapping->memory];
      *mapping = (Mapping){0};
      memory->mappings--;
      drop(memory);
    }
  }
  END;
}
CUresult CUDAAPI cuMemHostAlloc(void **address, size_t size, unsigned int flags) {
  BEGIN {
    if (flags || !size) result = CUDA_ERROR_INVALID_VALUE;
    else if (pinned + size > most_pinned) result = CUDA_ERROR_OUT_OF_MEMORY;
    else {
      size_t *block = malloc(size + 64);
      *block = size;
      pinned += size;
      *address = (char *)block + 64;
      memset(*address, 0x77, size);
    }
  }
  END;
}
CUresult CUDAAPI cuMemFreeHost(void *address) {
  BEGIN_FREE(1);
  size_t *block = (size_t *)((char *)address - 64);
  pinned -= *block;
  free(block);
  END;
}
CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags) {
  BEGIN_FREE(1);
  *stream = (CUstream)copies;
  if (flags != CU_STREAM_NON_BLOCKING) result = CUDA_ERROR_INVALID_VALUE;
  END;
}
CUresult CUDAAPI cuStreamQuery(CUstream stream) {
  BEGIN {
    if (stream != (CUstream)copies) result = CUDA_ERROR_INVALID_HANDLE;
    else if (num_copies && !asked++) result = CUDA_ERROR_NOT_READY;
    else copy_all();
  }
  END;
}
static CUresult queue(void *to, const void *from, size_t size, CUdeviceptr on_card, CUstream stream) {
  BEGIN {
    if (stream != (CUstream)copies || !covering(mappings, on_card, size) || num_copies == MOST)
      result = CUDA_ERROR_INVALID_VALUE;
    else copies[num_copies++] = (Copy){to, from, size};
  }
  END;
}
CUresult CUDAAPI cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream) {
  return queue(to, (const void *)from, size, from, stream);
}
CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
  return queue((void *)to, from, size, to, stream);
}
CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name) {
  *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
  return CUDA_SUCCESS;
}
