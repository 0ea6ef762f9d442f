/* Products over positions, for float32 on a CPU: gradients of single examples, Σ_t l_t ⊗ r_t in every group, with their
 * sums of squares; and the weighted sum over all examples.
 *
 * What engine/contributions.py and engine/reduce.py do by matrix products. Both sides are read where they lie, so that the
 * patches of a convolution are never written. An example's gradient does not depend on the others, on where it lies in
 * memory, nor on the number of threads; nor does a weighted sum depend on that number, or on what an example that is left
 * out holds.
 *
 *     pack        CHUNK positions of both sides, beside each other, in the cache
 *     tile        ROWS × WIDTH entries of the product, held in registers
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

const char clipwise_source[] = SOURCE; /* of which text this was built */

#if defined(__AVX512F__)
enum { LANES = 16, MOST = 4 };
#elif defined(__AVX__)
enum { LANES = 8, MOST = 2 };
#else
enum { LANES = 4, MOST = 2 };
#endif
enum { ROWS = 4, WIDTH = MOST * LANES, CHUNK = 256, SIDE = 256, BLOCK = 128, SHORT = 128 };
typedef float lanes __attribute__((vector_size(4 * LANES)));

typedef struct {
    const float *left, *right;
    int64_t left_strides[4];       /* between examples, groups, positions, entries: [b, g, t, p] */
    int64_t right_strides[2];      /* between examples and groups */
    const int64_t *places, *spots; /* where position t and entry d of the right side lie within its group */
    int64_t run;                   /* entries that lie beside each other */
    int64_t examples, groups, positions, p, d;
    float *out;      /* [b, g, p, d] */
    double *squares; /* [b] */
} Gradients;

typedef struct {
    float left[CHUNK * SIDE], right[CHUNK * WIDTH];
    float made[BLOCK * BLOCK];
    double total[BLOCK * BLOCK];
} Space;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* [positions, count rounded up to ROWS] */
static void pack_left(const float *from, const int64_t *strides, int64_t positions, int64_t count, float *to) {
    int64_t whole = (count + ROWS - 1) / ROWS * ROWS;
    for (int64_t t = 0; t < positions; t++, to += whole) {
        for (int64_t i = 0; i < count; i++) to[i] = from[t * strides[2] + i * strides[3]];
        for (int64_t i = count; i < whole; i++) to[i] = 0;
    }
}

/* `count` entries, in pieces of `piece` that lie beside each other. */
static inline __attribute__((always_inline)) void gather(const float *from, const int64_t *spots, int64_t count, int piece,
                                                         float *to) {
    for (int64_t j = 0; j < count; j += piece) memcpy(to + j, from + spots[j], sizeof(float) * piece);
}

/* [positions, WIDTH]; entries lie beside each other in runs of `run` at least. */
static void pack_right(const float *from, const int64_t *places, const int64_t *spots, int64_t positions, int64_t count,
                       int64_t run, float *to) {
    for (int64_t t = 0; t < positions; t++, to += WIDTH) {
        if (WIDTH % 16 == 0 && run % 16 == 0) /* a piece must not go beyond the row */
            gather(from + places[t], spots, count, 16, to);
        else if (WIDTH % 8 == 0 && run % 8 == 0)
            gather(from + places[t], spots, count, 8, to);
        else if (run % 4 == 0)
            gather(from + places[t], spots, count, 4, to);
        else
            gather(from + places[t], spots, count, 1, to);
        for (int64_t j = count; j < WIDTH; j++) to[j] = 0;
    }
}

/* ROWS × parts·LANES entries: Σ_t left[t][i]·right[t][j], set or added. */
static inline __attribute__((always_inline)) void tile(const float *left, int64_t step, const float *right,
                                                       int64_t positions, int parts, int64_t rows, int64_t columns,
                                                       float *out, int64_t stride, int add) {
    lanes sums[ROWS][MOST];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < parts; j++) sums[i][j] = (lanes){0};
    for (int64_t t = 0; t < positions; t++) {
        lanes line[MOST];
#pragma GCC unroll 4
        for (int j = 0; j < parts; j++) memcpy(&line[j], right + t * WIDTH + j * LANES, sizeof(lanes));
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < parts; j++) sums[i][j] += left[t * step + i] * line[j];
    }
    if (rows == ROWS && columns == parts * LANES && !add) {
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < parts; j++) memcpy(&out[i * stride + j * LANES], &sums[i][j], sizeof(lanes));
        return;
    }
    float made[ROWS][WIDTH];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < parts; j++) memcpy(&made[i][j * LANES], &sums[i][j], sizeof(lanes));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) out[i * stride + j] = add ? out[i * stride + j] + made[i][j] : made[i][j];
}

static void tiles(const Space *space, int64_t step, int64_t positions, int64_t rows, int64_t columns, float *out,
                  int64_t stride, int add) {
    int parts = (int)((columns + LANES - 1) / LANES);
    for (int64_t i = 0; i < rows; i += ROWS) {
        const float *left = space->left + i;
        int64_t some = least(ROWS, rows - i);
        float *to = out + i * stride;
        if (parts == 1)
            tile(left, step, space->right, positions, 1, some, columns, to, stride, add);
        else if (parts == 2)
            tile(left, step, space->right, positions, 2, some, columns, to, stride, add);
#if defined(__AVX512F__)
        else if (parts == 3)
            tile(left, step, space->right, positions, 3, some, columns, to, stride, add);
        else
            tile(left, step, space->right, positions, 4, some, columns, to, stride, add);
#endif
    }
}

/* Σ x², in double and in a fixed order: LANES sums beside each other. */
static double sum_of_squares(const float *x, int64_t count) {
    double sums[LANES] = {0}, total = 0;
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += (double)x[k + l] * x[k + l];
    for (; k < count; k++) total += (double)x[k] * x[k];
    for (int l = 0; l < LANES; l++) total += sums[l];
    return total;
}

static void example(const Gradients *all, int64_t which, Space *space) {
    double squares = 0;
    for (int64_t group = 0; group < all->groups; group++) {
        const float *left = all->left + which * all->left_strides[0] + group * all->left_strides[1];
        const float *right = all->right + which * all->right_strides[0] + group * all->right_strides[1];
        float *out = all->out + (which * all->groups + group) * all->p * all->d;
        for (int64_t i = 0; i < all->p; i += SIDE)
            for (int64_t t = 0; t < all->positions; t += CHUNK) {
                int64_t rows = least(SIDE, all->p - i), positions = least(CHUNK, all->positions - t);
                const float *here = left + t * all->left_strides[2] + i * all->left_strides[3];
                pack_left(here, all->left_strides, positions, rows, space->left);
                for (int64_t j = 0; j < all->d; j += WIDTH) {
                    int64_t columns = least(WIDTH, all->d - j);
                    pack_right(right, all->places + t, all->spots + j, positions, columns, all->run, space->right);
                    tiles(space, (rows + ROWS - 1) / ROWS * ROWS, positions, rows, columns, out + i * all->d + j,
                          all->d, t > 0);
                }
            }
        if (!all->positions) memset(out, 0, sizeof(float) * all->p * all->d);
        squares += sum_of_squares(out, all->p * all->d);
    }
    all->squares[which] = squares;
}

/* All examples, shared among threads. 0, or 1 if there is no memory. */
int clipwise_gradients(const Gradients *all, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Space *space = aligned_alloc(64, (sizeof(Space) + 63) / 64 * 64);
        if (!space) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t which = 0; which < all->examples; which++)
            if (space) example(all, which, space);
        free(space);
    }
    return failed;
}

typedef struct {
    const float *sides[2];   /* [b, g, t, p] and [b, g, t, d] */
    int64_t strides[2][4];   /* between examples, groups, positions, entries */
    const float *weights;    /* [b] */
    const uint8_t *keep;     /* [b]: examples that are left out are not read */
    int64_t weighed;         /* the side that takes the weights, rounded */
    int64_t examples, groups, positions, p, d;
    float *out; /* [g, p, d] */
} Sum;

/* Rows first … first + count of all examples' positions, entries from `from` on, `length` beside each other. */
static void pack_rows(const Sum *sum, int side, int64_t group, int64_t first, int64_t count, int64_t from, int64_t entries,
                      int64_t length, float *to) {
    const int64_t *strides = sum->strides[side];
    for (int64_t row = first; row < first + count; row++, to += length) {
        int64_t which = row / sum->positions, t = row % sum->positions;
        if (!sum->keep[which]) {
            memset(to, 0, sizeof(float) * length);
            continue;
        }
        const float *here =
            sum->sides[side] + which * strides[0] + group * strides[1] + t * strides[2] + from * strides[3];
        float weight = side == sum->weighed ? sum->weights[which] : 1;
        if (strides[3] == 1)
            for (int64_t i = 0; i < entries; i++) to[i] = weight * here[i];
        else
            for (int64_t i = 0; i < entries; i++) to[i] = weight * here[i * strides[3]];
        for (int64_t i = entries; i < length; i++) to[i] = 0;
    }
}

/* BLOCK × BLOCK entries of one group's sum: SHORT rows at a time in float32, their sums in double, rounded once. So the
 * rounding of a sum does not grow with its length. */
static void part_of_sum(const Sum *sum, int64_t group, int64_t i, int64_t j, Space *space) {
    int64_t all = sum->examples * sum->positions, rows = least(BLOCK, sum->p - i), across = least(BLOCK, sum->d - j);
    int64_t step = (rows + ROWS - 1) / ROWS * ROWS;
    memset(space->total, 0, sizeof space->total);
    for (int64_t first = 0; first < all; first += SHORT) {
        int64_t count = least(SHORT, all - first);
        pack_rows(sum, 0, group, first, count, i, rows, step, space->left);
        for (int64_t k = 0; k < across; k += WIDTH) {
            int64_t columns = least(WIDTH, across - k);
            pack_rows(sum, 1, group, first, count, j + k, columns, WIDTH, space->right);
            tiles(space, step, count, rows, columns, space->made + k, BLOCK, 0);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < across; c++) space->total[r * BLOCK + c] += space->made[r * BLOCK + c];
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < across; c++)
            sum->out[(group * sum->p + i + r) * sum->d + j + c] = (float)space->total[r * BLOCK + c];
}

/* Blocks of the sum, shared among threads. 0, or 1 if there is no memory. */
int clipwise_weighted_sum(const Sum *sum, int threads) {
    int failed = 0;
    int64_t down = (sum->p + BLOCK - 1) / BLOCK, across = (sum->d + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Space *space = aligned_alloc(64, (sizeof(Space) + 63) / 64 * 64);
        if (!space) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < sum->groups * down * across; item++)
            if (space)
                part_of_sum(sum, item / (down * across), item / across % down * BLOCK, item % across * BLOCK, space);
        free(space);
    }
    return failed;
}
