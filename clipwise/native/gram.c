/* Inner products of positions, and the sum over pairs of them: G = Σ_ts ⟨l_t, l_s⟩⟨r_t, r_s⟩ of every example.
 *
 * What engine/gram.py does by matrix products, for float32 on a CPU, with half of the symmetric products and no matrix of
 * pairs in memory. An inner product is summed in float32 for at most PIECE entries, then in float64, so its error is at
 * most that of gram.py's bound; products of two of them and their sum are in float64. An example's numbers do not depend
 * on the others, nor on the number of threads.
 *
 *     pack        16 positions side by side, entry by entry: a line of the cache each
 *     tile        16 × 16 inner products, held in registers
 *     block       BLOCK × BLOCK of them, of one side
 *     example     its blocks on and above the diagonal, both sides, multiplied and summed
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

const char clipwise_source[] = SOURCE; /* of which text this was built */

enum { TILE = 16, BLOCK = 128, PIECE = 512 };

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 16 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 4 };
#else
enum { LANES = 4, ROWS = 2 };
#endif
enum { PARTS = TILE / LANES };
typedef float lanes __attribute__((vector_size(4 * LANES)));

typedef struct {
    const float *data[2];  /* left and right: [examples, groups, positions, width], entries beside each other */
    int64_t strides[2][3]; /* between examples, groups, positions */
    int64_t width[2];
    int64_t groups, positions;
    double *total;      /* [examples, groups]: G */
    double *squares[2]; /* [examples, groups, positions]: ‖l_t‖² and ‖r_t‖² */
} Use;

typedef struct {
    float rows[BLOCK * PIECE], columns[BLOCK * PIECE]; /* packed */
    double inner[2][BLOCK][BLOCK];
} Space;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__AVX512F__)
typedef int32_t places __attribute__((vector_size(64)));
#define EACH(f, s)                                                                                                     \
    {f(0, s), f(1, s), f(2, s),  f(3, s),  f(4, s),  f(5, s),  f(6, s),  f(7, s),                                      \
     f(8, s), f(9, s), f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s)}
#define UPPER(l, s) ((l) & (s) ? 16 + (l) - (s) : (l))
#define LOWER(l, s) ((l) & (s) ? 16 + (l) : (l) + (s))
#if defined(__clang__)
#define SHUFFLED(a, b, f, s)                                                                                           \
    __builtin_shufflevector(a, b, f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s),     \
                            f(9, s), f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s))
#else
#define SHUFFLED(a, b, f, s) __builtin_shuffle(a, b, (places)EACH(f, s))
#endif
#define SWAP(s)                                                                                                        \
    for (int i = 0; i < TILE; i++)                                                                                     \
        if (!(i & s)) {                                                                                                \
            lanes a = x[i], b = x[i + s];                                                                              \
            x[i] = SHUFFLED(a, b, UPPER, s), x[i + s] = SHUFFLED(a, b, LOWER, s);                                      \
        }

/* 16 positions × 16 entries, turned: squares of 8, of 4, of 2 and of 1 across the diagonal change places. */
static void turn(const float *from, int64_t stride, float *to) {
    lanes x[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) memcpy(&x[i], from + i * stride, sizeof(lanes));
#pragma GCC unroll 16
    SWAP(8)
#pragma GCC unroll 16
    SWAP(4)
#pragma GCC unroll 16
    SWAP(2)
#pragma GCC unroll 16
    SWAP(1)
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) memcpy(to + i * TILE, &x[i], sizeof(lanes));
}
#else
static void turn(const float *from, int64_t stride, float *to) {
    for (int k = 0; k < TILE; k++)
        for (int i = 0; i < TILE; i++) to[k * TILE + i] = from[i * stride + k];
}
#endif

/* `count` positions of `width` entries, in tiles of 16 positions; what is missing from the last one is 0. */
static void pack(const float *from, int64_t stride, int64_t count, int64_t width, float *to) {
    for (int64_t first = 0; first < count; first += TILE, to += TILE * width) {
        const float *here = from + first * stride;
        int64_t there = least(TILE, count - first);
        if (there < TILE) memset(to, 0, sizeof(float) * TILE * width);
        int64_t k = 0;
        for (; there == TILE && k + TILE <= width; k += TILE) turn(here + k, stride, to + k * TILE);
        for (; k < width; k++)
            for (int64_t i = 0; i < there; i++) to[k * TILE + i] = here[i * stride + k];
    }
}

/* found[i][j] += Σ_k a[k][i]·b[k][j] for 16 × 16 positions. */
static void tile(const float *a, const float *b, int64_t width, double *found) {
    for (int first = 0; first < TILE; first += ROWS) {
        lanes sums[ROWS][PARTS];
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; j++) sums[i][j] = (lanes){0};
        for (int64_t k = 0; k < width; k++) {
            lanes line[PARTS];
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; j++) memcpy(&line[j], b + k * TILE + j * LANES, sizeof(lanes));
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
                for (int j = 0; j < PARTS; j++) sums[i][j] += a[k * TILE + first + i] * line[j];
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; j++)
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++) found[(first + i) * BLOCK + j * LANES + l] += sums[i][j][l];
    }
}

/* Inner products of one side, between the positions from `row` on and those from `column` on. */
static void block(const Use *use, int side, const float *data, int64_t row, int64_t column, Space *space) {
    int64_t stride = use->strides[side][2], width = use->width[side];
    int64_t rows = least(BLOCK, use->positions - row), columns = least(BLOCK, use->positions - column);
    double *found = &space->inner[side][0][0];
    memset(found, 0, sizeof(double) * BLOCK * ((rows + TILE - 1) / TILE * TILE));
    for (int64_t first = 0; first < width; first += PIECE) {
        int64_t length = least(PIECE, width - first);
        pack(data + row * stride + first, stride, rows, length, space->rows);
        if (row != column) pack(data + column * stride + first, stride, columns, length, space->columns);
        const float *across = row == column ? space->rows : space->columns;
        for (int64_t i = 0; i < rows; i += TILE)
            for (int64_t j = row == column ? i : 0; j < columns; j += TILE)
                tile(space->rows + i * length, across + j * length, length, found + i * BLOCK + j);
    }
}

/* Σ x·y, in a fixed order: LANES sums beside each other. */
static double dot(const double *x, const double *y, int64_t count) {
    double sums[LANES] = {0}, total = 0;
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += x[k + l] * y[k + l];
    for (; k < count; k++) total += x[k] * y[k];
    for (int l = 0; l < LANES; l++) total += sums[l];
    return total;
}

static void example(const Use *use, int64_t which, int64_t group, Space *space) {
    const float *data[2];
    int64_t positions = use->positions, here = which * use->groups + group;
    double total = 0;
    for (int side = 0; side < 2; side++)
        data[side] = use->data[side] + which * use->strides[side][0] + group * use->strides[side][1];
    for (int64_t row = 0; row < positions; row += BLOCK)
        for (int64_t column = row; column < positions; column += BLOCK) {
            for (int side = 0; side < 2; side++) block(use, side, data[side], row, column, space);
            int64_t rows = least(BLOCK, positions - row), columns = least(BLOCK, positions - column);
            double once = 0, twice = 0;
            for (int64_t i = 0; i < rows; i++) {
                const double *left = space->inner[0][i], *right = space->inner[1][i];
                if (row == column) once += left[i] * right[i];
                int64_t first = row == column ? i + 1 : 0;
                twice += dot(left + first, right + first, columns - first);
            }
            total += once + 2 * twice;
            if (row == column)
                for (int side = 0; side < 2; side++)
                    for (int64_t i = 0; i < rows; i++)
                        use->squares[side][here * positions + row + i] = space->inner[side][i][i];
        }
    use->total[here] = total;
}

/* All examples, shared among threads. 0, or 1 if there is no memory. */
int clipwise_gram(const Use *use, int64_t examples, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Space *space = aligned_alloc(64, (sizeof(Space) + 63) / 64 * 64);
        if (!space) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < examples * use->groups; item++)
            if (space) example(use, item / use->groups, item % use->groups, space);
        free(space);
    }
    return failed;
}
