/* A stand-in for NVIDIA's libnvidia-ml.so.1, for machines without a GPU: the calls that the nvidia probe makes,
 * with the structures of nvml.h, answered from a file that is looked at again in every call.
 *
 * The file is $FAKE_NVML_STATE ("%n" in it stands for $SLURMD_NODENAME), or /run/fake-nvml/state. Without it no
 * driver is loaded. A line is VERB GPU NAME VALUE [ORDER]; GPU -1 means all, and a later line wins:
 *   gpus -1 - N          how many there are
 *   set GPU NAME VALUE   what a GPU answers, by the names in the calls below
 *   fail GPU CALL CODE   that call, or "field.ID", answers with this error
 *   hang -1 CALL 1       that call never returns; crash -1 CALL 1: it ends the process
 *   event GPU TYPE DATA ORDER   once for each event set made before it was written: a higher ORDER than all then
 * One thread at a time. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int nvmlReturn_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, TIMEOUT = 10,
       GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };

struct row { char verb[8]; int gpu; char name[56]; long long value, order; };
static struct row rows[1024];
static int row_count, state_found;
static struct stat state_seen;

typedef struct nvmlDevice_st { int index; } *nvmlDevice_t;
static struct nvmlDevice_st devices[64];
typedef struct nvmlEventSet_st { long long told; uint64_t types[64]; } *nvmlEventSet_t;

static void state_path(char *path, size_t size) {
    const char *given = getenv("FAKE_NVML_STATE"), *node = getenv("SLURMD_NODENAME");
    const char *mark = given ? strstr(given, "%n") : NULL;
    if (mark) snprintf(path, size, "%.*s%s%s", (int)(mark - given), given, node ? node : "", mark + 2);
    else snprintf(path, size, "%s", given ? given : "/run/fake-nvml/state");
}

static void read_state(void) {
    char path[4096], line[256];
    struct stat now;
    state_path(path, sizeof path);
    state_found = stat(path, &now) == 0;
    if (!state_found) { row_count = 0; memset(&state_seen, 0, sizeof state_seen); return; }
    if (now.st_ino == state_seen.st_ino && now.st_size == state_seen.st_size &&
        !memcmp(&now.st_mtim, &state_seen.st_mtim, sizeof now.st_mtim)) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    state_seen = now;
    row_count = 0;
    while (row_count < 1024 && fgets(line, sizeof line, file)) {
        struct row *r = &rows[row_count];
        r->order = 0;
        if (sscanf(line, "%7s %d %55s %lld %lld", r->verb, &r->gpu, r->name, &r->value, &r->order) >= 4) row_count++;
    }
    fclose(file);
}

static const struct row *find(const char *verb, int gpu, const char *name) {
    for (int i = row_count - 1; i >= 0; i--)
        if (!strcmp(rows[i].verb, verb) && (rows[i].gpu == gpu || rows[i].gpu == -1) && !strcmp(rows[i].name, name))
            return &rows[i];
    return NULL;
}

static long long get(int gpu, const char *name, long long otherwise) {
    const struct row *r = find("set", gpu, name);
    return r ? r->value : otherwise;
}

static int gpu_count(void) {
    const struct row *r = find("gpus", -1, "-");
    return r ? (int)r->value : 0;
}

/* What every call does first: -1 is a call that speaks of no GPU. */
static nvmlReturn_t enter(const char *call, int gpu) {
    read_state();
    if (find("crash", -1, call)) abort();
    if (find("hang", -1, call)) for (;;) pause();
    const struct row *r = find("fail", gpu, call);
    if (r) return (nvmlReturn_t)r->value;
    if (gpu >= 0 && get(gpu, "lost", 0)) return GPU_IS_LOST;
    return SUCCESS;
}
#define ENTER(gpu) do { nvmlReturn_t code = enter(__func__, gpu); if (code) return code; } while (0)
#define ENTER_DEVICE() do { if (device < devices || device >= devices + 64) return INVALID_ARGUMENT; \
                            ENTER(device->index); } while (0)

/* One number into one pointer is most of NVML. */
#define NUMBER(call, type, name, otherwise) \
    nvmlReturn_t call(nvmlDevice_t device, type *value) { \
        ENTER_DEVICE(); *value = (type)get(device->index, name, otherwise); return SUCCESS; }
NUMBER(nvmlDeviceGetIndex, unsigned, "index", device->index)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, "retired_pages_pending", 0)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie_width_max", 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie_generation", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie_generation_max", 5)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie_replays", 0)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "clocks_event_reasons", 0)
NUMBER(nvmlDeviceGetSupportedEventTypes, unsigned long long, "event_types", 0xC00B)

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    ENTER(-1);
    for (int i = 0; i < 64; i++) devices[i].index = i;
    return state_found ? SUCCESS : DRIVER_NOT_LOADED;
}
nvmlReturn_t nvmlShutdown(void) { ENTER(-1); return SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t code) {
    static char text[32];
    snprintf(text, sizeof text, "error %d", code);
    return text;
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER(-1);
    snprintf(version, length, "fake");
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) { ENTER(-1); *count = gpu_count(); return SUCCESS; }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    if (index >= 64) return INVALID_ARGUMENT;
    ENTER((int)index);
    if ((int)index >= gpu_count()) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    ENTER_DEVICE();
    snprintf(uuid, length, "GPU-%08x-0000-0000-0000-000000000000", 0xfa4e0000u + device->index);
    return SUCCESS;
}
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } nvmlPciInfo_t;
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    ENTER_DEVICE();
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + device->index;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    snprintf(info->legacy, sizeof info->legacy, "0000:%02X:00.0", info->bus);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, unsigned long long *count) {
    ENTER_DEVICE();
    if (type != 1) return NOT_SUPPORTED; /* 1: uncorrected */
    *count = get(device->index, counter ? "ecc_aggregate" : "ecc_uncorrectable", 0);
    return SUCCESS;
}
typedef struct {
    unsigned version;
    unsigned long long aggregate_parity, aggregate_secded, aggregate_corrected;
    unsigned long long volatile_parity, volatile_secded, volatile_corrected;
    unsigned long long bucket_l2, bucket_sm, bucket_pcie, bucket_mcu, bucket_other;
    unsigned threshold_exceeded;
} nvmlEccSramErrorStatus_t;
_Static_assert(sizeof(nvmlEccSramErrorStatus_t) == 0x68, "the layout of nvml.h");
nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status) {
    ENTER_DEVICE();
    if (status->version != (sizeof *status | 1 << 24)) return VERSION_MISMATCH;
    status->aggregate_secded = get(device->index, "sram_uncorrectable", 0);
    status->volatile_secded = status->aggregate_secded;
    status->threshold_exceeded = get(device->index, "sram_threshold_exceeded", 0);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable,
                                       unsigned *pending, unsigned *failed) {
    ENTER_DEVICE();
    *correctable = get(device->index, "rows_correctable", 0);
    *uncorrectable = get(device->index, "rows_uncorrectable", 0);
    *pending = get(device->index, "rows_pending", 0);
    *failed = get(device->index, "rows_failed", 0);
    return SUCCESS;
}
typedef struct { unsigned version, channel, tpc; } nvmlRepairStatus_t;
nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, nvmlRepairStatus_t *status) {
    ENTER_DEVICE();
    if (status->version != (sizeof *status | 1 << 24)) return VERSION_MISMATCH;
    status->channel = get(device->index, "repair_channel", 0);
    status->tpc = get(device->index, "repair_tpc", 0);
    return SUCCESS;
}
typedef struct { unsigned version; int margin; } nvmlMarginTemperature_t;
nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *temperature) {
    ENTER_DEVICE();
    if (temperature->version != (sizeof *temperature | 1 << 24)) return VERSION_MISMATCH;
    temperature->margin = (int)get(device->index, "temperature_margin", 40);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    ENTER_DEVICE();
    *millijoules = get(device->index, "energy", 1000000);
    return SUCCESS;
}
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    ENTER_DEVICE();
    rates->gpu = get(device->index, "utilization", 100);
    rates->memory = 0;
    return SUCCESS;
}
typedef struct {
    unsigned version;
    unsigned char cluster[16];
    nvmlReturn_t status;
    unsigned clique;
    unsigned char state;
    unsigned health;
} nvmlGpuFabricInfo_t;
_Static_assert(sizeof(nvmlGpuFabricInfo_t) == 0x24, "the layout of nvml.h");
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    ENTER_DEVICE();
    if (info->version != (sizeof *info | 2 << 24)) return VERSION_MISMATCH;
    memset((char *)info + 4, 0xA5, sizeof *info - 4); /* as a library may: padding holds anything */
    info->status = (nvmlReturn_t)get(device->index, "fabric_status", 0);
    info->clique = 0;
    info->state = (unsigned char)get(device->index, "fabric_state", 3);
    info->health = (unsigned)get(device->index, "fabric_health", 0);
    return SUCCESS;
}

/* "NAME.LINK" where that is set, else "NAME". */
static long long get_link(int gpu, const char *name, unsigned link, long long otherwise) {
    char scoped[64];
    if (row_count <= 1) return otherwise; /* nothing is set */
    snprintf(scoped, sizeof scoped, "%s.%u", name, link);
    return get(gpu, scoped, get(gpu, name, otherwise));
}
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active) {
    ENTER_DEVICE();
    if (link >= get(device->index, "nvlinks", 18)) return INVALID_ARGUMENT;
    *active = (unsigned)get_link(device->index, "nvlink_state", link, 1);
    return SUCCESS;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type;
    nvmlReturn_t code;
    union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; int si; unsigned short us; } value;
} nvmlFieldValue_t;
_Static_assert(sizeof(nvmlFieldValue_t) == 40, "the layout of nvml.h");
enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, UNSIGNED_SHORT = 6 };
static const struct field { unsigned id; const char *name; int type, per_link; long long otherwise; } fields[] = {
    {4, "ecc_uncorrectable", UNSIGNED_LONG_LONG, 0, 0},  {6, "ecc_aggregate", UNSIGNED_LONG_LONG, 0, 0},
    {31, "retired_pages_pending", UNSIGNED_INT, 0, 0},    {94, "pcie_replays", UNSIGNED_INT, 0, 0},
    {91, "nvlinks", UNSIGNED_SHORT, 0, 18},              {230, "recovery_action", UNSIGNED_INT, 0, 0},
    {162, "nvlink_recoveries", UNSIGNED_LONG_LONG, 1, 0}, {163, "nvlink_crc_errors", UNSIGNED_LONG_LONG, 1, 0},
    {165, "nvlink_state", UNSIGNED_INT, 1, 1},
    /* The two below are of newer GPUs: not supported unless the file says something of them. */
    {208, "nvlink_received_errors", UNSIGNED_LONG_LONG, 1, -1},
    {214, "nvlink_failed_recoveries", UNSIGNED_LONG_LONG, 1, -1},
};
static void answer(int gpu, nvmlFieldValue_t *v) {
    char failing[32] = "";
    if (row_count > 1) snprintf(failing, sizeof failing, "field.%u", v->field);
    const struct row *r = find("fail", gpu, failing);
    memset(&v->value, 0xA5, sizeof v->value); /* undefined unless the code is SUCCESS, and past the type's size */
    v->type = 0;
    v->code = r ? (nvmlReturn_t)r->value : NOT_SUPPORTED;
    for (size_t i = 0; !r && i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].id != v->field) continue;
        if (fields[i].per_link && v->scope >= get(gpu, "nvlinks", 18)) { v->code = INVALID_ARGUMENT; return; }
        long long value = fields[i].per_link ? get_link(gpu, fields[i].name, v->scope, fields[i].otherwise)
                                             : get(gpu, fields[i].name, fields[i].otherwise);
        if (value < 0) return;
        v->code = SUCCESS;
        v->type = fields[i].type;
        if (v->type == UNSIGNED_INT) v->value.ui = (unsigned)value;
        else if (v->type == UNSIGNED_SHORT) v->value.us = (unsigned short)value;
        else v->value.ull = (unsigned long long)value;
    }
}
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    ENTER_DEVICE();
    for (int i = 0; i < count; i++) answer(device->index, &values[i]);
    return SUCCESS;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    ENTER(-1);
    *set = calloc(1, sizeof **set);
    for (int i = 0; i < row_count; i++)
        if (!strcmp(rows[i].verb, "event") && rows[i].order > (*set)->told) (*set)->told = rows[i].order;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    ENTER_DEVICE();
    if (types & ~(unsigned long long)get(device->index, "event_types", 0xC00B)) return NOT_SUPPORTED;
    set->types[device->index] |= types;
    return SUCCESS;
}
typedef struct { nvmlDevice_t device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } nvmlEventData_t;
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms) {
    for (;;) {
        ENTER(-1);
        const struct row *next = NULL;
        for (int i = 0; i < row_count; i++) {
            const struct row *r = &rows[i];
            if (!strcmp(r->verb, "event") && r->order > set->told && r->gpu >= 0 && r->gpu < 64 &&
                (set->types[r->gpu] & strtoull(r->name, NULL, 0)) && (!next || r->order < next->order)) next = r;
        }
        if (next) {
            set->told = next->order;
            *data = (nvmlEventData_t){&devices[next->gpu], strtoull(next->name, NULL, 0), next->value, ~0u, ~0u};
            return SUCCESS;
        }
        if (!timeout_ms) return TIMEOUT;
        unsigned nap = timeout_ms < 10 ? timeout_ms : 10;
        usleep(nap * 1000);
        timeout_ms -= nap;
    }
}
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { ENTER(-1); free(set); return SUCCESS; }
