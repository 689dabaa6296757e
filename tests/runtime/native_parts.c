/* What tests ask of the pool's sources. To be built with their folder on the include path. */
#include "pool.h"
#include "checksum.h"

size_t block_size(void) { return BLOCK; }
size_t device_size(void) { return sizeof(Device); }

/* The CRC32C of `bytes` through lane 0, and the sum of a block. `hardware`: by the instruction (1) or the table (0).
 * Returns 0 if this CPU lacks the instruction, else 1. */
int checksum_by(int hardware, const void *memory, size_t bytes, uint32_t *crc32c, uint64_t *sum) {
    pthread_once(&checksum_once, prepare_checksum);
    if (hardware && !has_hardware()) return 0;
    Lanes lanes = hardware ? lanes_hardware : lanes_portable;
    uint32_t crc[4] = {~0u, ~0u, ~0u, ~0u};
    for (size_t word = 0; word < bytes / 8; word++) {
        unsigned char four[32] = {0}; /* one word of the plain CRC in lane 0; the other lanes do not matter */
        memcpy(four, (const unsigned char *)memory + 8 * word, 8);
        lanes(crc, four, 8);
    }
    *crc32c = ~crc_bytes(crc[0], (const unsigned char *)memory + bytes / 8 * 8, bytes % 8);
    *sum = sum_with(lanes, memory, bytes);
    return 1;
}
