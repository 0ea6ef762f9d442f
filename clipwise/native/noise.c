/* Gaussian numbers of chacha.py for a CPU: ChaCha20 and Box–Muller. A pure function of key and place: nothing here draws.
 *
 * To be compiled without contraction (-ffp-contract=off): then every build gives the same numbers to the last bit.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__FAST_MATH__) || (defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0)
#error "double arithmetic must be that of the standard"
#endif

const char clipwise_source[] = SOURCE; /* of which text this was built */

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { BLOCKS = 256, CHUNK = 8 * BLOCKS };
typedef uint32_t lanes __attribute__((vector_size(4 * LANES)));

typedef struct {
    uint32_t key[8];
    int64_t start, length; /* elements of the key's stream, and as many of one of these: */
    float *narrow;
    double *wide;
} Part;

/* Keys, and noise that was added, must not be found in memory later. */
static void wipe(void *memory, size_t size) {
    memset(memory, 0, size);
    __asm__ volatile("" : : "r"(memory) : "memory"); /* or a compiler leaves it out */
}

#define TURN(x, by) ((x) << (by) | (x) >> (32 - (by)))
#define QUARTER(a, b, c, d)                                                                                            \
    a += b, d = TURN(d ^ a, 16), c += d, b = TURN(b ^ c, 12), a += b, d = TURN(d ^ a, 8), c += d, b = TURN(b ^ c, 7)

/* words[w][i] is word w of block first + i, RFC 8439 with a counter of 64 bits. */
static void blocks(const uint32_t key[8], uint64_t first, uint32_t words[16][BLOCKS]) {
    const uint32_t constants[4] = {0x61707865, 0x3320646E, 0x79622D32, 0x6B206574};
    for (int lane = 0; lane < BLOCKS; lane += LANES) {
        lanes start[16], x[16];
        for (int w = 0; w < 12; w++) start[w] = (lanes){0} + (w < 4 ? constants[w] : key[w - 4]);
        for (int w = 12; w < 16; w++) start[w] = (lanes){0};
        for (int i = 0; i < LANES; i++) {
            start[12][i] = (uint32_t)(first + lane + i);
            start[13][i] = (uint32_t)((first + lane + i) >> 32);
        }
        memcpy(x, start, sizeof x);
        for (int round = 0; round < 10; round++) {
            QUARTER(x[0], x[4], x[8], x[12]), QUARTER(x[1], x[5], x[9], x[13]);
            QUARTER(x[2], x[6], x[10], x[14]), QUARTER(x[3], x[7], x[11], x[15]);
            QUARTER(x[0], x[5], x[10], x[15]), QUARTER(x[1], x[6], x[11], x[12]);
            QUARTER(x[2], x[7], x[8], x[13]), QUARTER(x[3], x[4], x[9], x[14]);
        }
        for (int w = 0; w < 16; w++) {
            x[w] += start[w];
            memcpy(&words[w][lane], &x[w], sizeof x[w]);
        }
        wipe(start, sizeof start); /* the key */
    }
}

/* ln u for 2⁻⁹⁷ ≤ u ≤ 1: with u = 2^e·m and m around 1, e·ln 2 + 2·artanh((m − 1)/(m + 1)), whose series is at s² ≤ 0.03. */
static inline double logarithm(double u) {
    uint64_t bits;
    memcpy(&bits, &u, sizeof bits);
    /* 0x3FE6A09E begins √½: what is above it, up to √2, has e = 0 */
    int32_t exponent = ((int32_t)(bits >> 32) - 0x3FE6A09E) >> 20;
    bits -= (uint64_t)(int64_t)exponent << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    double s = (m - 1) / (m + 1), z = s * s;
    double series = 1.0 / 21;
    series = series * z + 1.0 / 19;
    series = series * z + 1.0 / 17;
    series = series * z + 1.0 / 15;
    series = series * z + 1.0 / 13;
    series = series * z + 1.0 / 11;
    series = series * z + 1.0 / 9;
    series = series * z + 1.0 / 7;
    series = series * z + 1.0 / 5;
    series = series * z + 1.0 / 3;
    series = series * z + 1.0;
    return exponent * 0.69314718055994530942 + 2 * s * series;
}

/* radius·(cos, sin) of turn/2³² of a circle. The nearest quarter is taken off first, exactly; the series end below 2⁻⁵⁸. */
static inline void point(double radius, double turn, double *x, double *y) {
    double quarter = (double)(int32_t)(turn * 0x1p-30 + 0.5);
    double angle = (turn - quarter * 0x1p30) * (1.57079632679489661923 * 0x1p-30), z = angle * angle;
    double s = 1.0 / 355687428096000;
    s = s * z - 1.0 / 1307674368000;
    s = s * z + 1.0 / 6227020800;
    s = s * z - 1.0 / 39916800;
    s = s * z + 1.0 / 362880;
    s = s * z - 1.0 / 5040;
    s = s * z + 1.0 / 120;
    s = s * z - 1.0 / 6;
    s = angle + angle * z * s;
    double c = 1.0 / 20922789888000;
    c = c * z - 1.0 / 87178291200;
    c = c * z + 1.0 / 479001600;
    c = c * z - 1.0 / 3628800;
    c = c * z + 1.0 / 40320;
    c = c * z - 1.0 / 720;
    c = c * z + 1.0 / 24;
    c = 1 - z * (0.5 - z * c);
    int32_t turned = (int32_t)quarter;
    double across = turned & 1 ? s : c, up = turned & 1 ? c : s;
    *x = radius * ((turned + 1) & 2 ? -across : across);
    *y = radius * (turned & 2 ? -up : up);
}

/* Exactly; CPUs convert integers with a sign sooner. */
static inline double number(uint32_t word) { return (int32_t)(word ^ 0x80000000) + 0x1p31; }

/* As chacha.pair: 96 bits are the radius, 32 and the last 32 of those the angle. Of four pairs in a row the 256 numbers
 * with the cosine, then the 256 with the sine. */
void clipwise_pairs(const uint32_t words[16][BLOCKS], double scale, double *numbers) {
    double u[BLOCKS], turn[BLOCKS], x[BLOCKS], y[BLOCKS];
    for (int w = 0; w < 16; w += 4, numbers += 2 * BLOCKS) {
        for (int i = 0; i < BLOCKS; i++) {
            double low = number(words[w + 2][i]) * 0x1p-32;
            u[i] = (number(words[w][i]) + (number(words[w + 1][i]) + low) * 0x1p-32) * 0x1p-32 + 0x1p-97;
            turn[i] = number(words[w + 3][i]) + low;
        }
        for (int i = 0; i < BLOCKS; i++) u[i] = sqrt(-2 * scale * scale * logarithm(u[i]));
        for (int i = 0; i < BLOCKS; i++) point(u[i], turn[i], &x[i], &y[i]);
        memcpy(numbers, x, sizeof x);
        memcpy(numbers + BLOCKS, y, sizeof y);
    }
    wipe(u, sizeof u), wipe(turn, sizeof turn), wipe(x, sizeof x), wipe(y, sizeof y);
}

static void add(const Part *part, int64_t chunk, double scale) {
    uint32_t words[16][BLOCKS];
    double numbers[CHUNK];
    blocks(part->key, (uint64_t)chunk * BLOCKS, words);
    clipwise_pairs((const uint32_t(*)[BLOCKS])words, scale, numbers);
    int64_t first = chunk * CHUNK - part->start; /* of the part; negative where it begins within the chunk */
    int64_t from = first < 0 ? -first : 0, to = part->length - first < CHUNK ? part->length - first : CHUNK;
    if (part->wide)
        for (int64_t i = from; i < to; i++) part->wide[first + i] += numbers[i];
    else
        for (int64_t i = from; i < to; i++) part->narrow[first + i] = (float)(part->narrow[first + i] + numbers[i]);
    wipe(words, sizeof words);
    wipe(numbers, sizeof numbers);
}

/* Each part += scale · its numbers, added in float64 and rounded once. */
void clipwise_noise(const Part *parts, int64_t count, double scale, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < count; p++) {
        const Part *part = &parts[p];
        if (!part->length) continue;
        int64_t first = part->start / CHUNK, last = (part->start + part->length - 1) / CHUNK;
#pragma omp for schedule(dynamic, 4) nowait
        for (int64_t chunk = first; chunk <= last; chunk++) add(part, chunk, scale);
    }
}
