/* Calls every C file on memory that ends where its numbers do: run under address and undefined-behaviour sanitizers by
 * test_native.py, at every level. */
#define SOURCE "driver"
#include PART

static float *floats(int64_t count) {
    float *made = malloc(sizeof(float) * (count ? count : 1));
    for (int64_t i = 0; i < count; i++) made[i] = (float)(i % 7) - 3;
    return made;
}

#if defined(GRAM)
static void run(int64_t b, int64_t g, int64_t t, int64_t p, int64_t d) {
    float *left = floats(b * g * t * p), *right = floats(b * g * t * d);
    double *total = malloc(sizeof(double) * b * g), *one = malloc(sizeof(double) * b * g * t);
    double *other = malloc(sizeof(double) * b * g * t);
    Use use = {{left, right}, {{g * t * p, t * p, p}, {g * t * d, t * d, d}}, {p, d}, g, t, total, {one, other}};
    if (clipwise_gram(&use, b, 2)) abort();
    free(left), free(right), free(total), free(one), free(other);
}
#elif defined(PRODUCTS)
static void run(int64_t b, int64_t g, int64_t t, int64_t p, int64_t d) {
    float *left = floats(b * g * t * p), *right = floats(b * g * t * d), *weights = floats(b);
    float *out = floats(b * g * p * d), *sum = floats(g * p * d);
    double *squares = malloc(sizeof(double) * b);
    int64_t *places = malloc(sizeof(int64_t) * t), *spots = malloc(sizeof(int64_t) * d);
    uint8_t *keep = malloc(b);
    for (int64_t i = 0; i < b; i++) keep[i] = i != 1;
    for (int64_t i = 0; i < t; i++) places[i] = i * d;
    for (int64_t i = 0; i < d; i++) spots[i] = i;
    Gradients all = {left, right, {g * t * p, t * p, p, 1}, {g * t * d, t * d}, places, spots, d, b, g, t, p, d, out, squares};
    if (clipwise_gradients(&all, 2)) abort();
    Sum what = {{left, right}, {{g * t * p, t * p, p, 1}, {g * t * d, t * d, d, 1}}, weights, keep, 1, b, g, t, p, d, sum};
    if (clipwise_weighted_sum(&what, 2)) abort();
    free(left), free(right), free(weights), free(out), free(sum), free(squares), free(places), free(spots), free(keep);
}
#else
static void run(int64_t b, int64_t g, int64_t t, int64_t p, int64_t d) {
    float *narrow = floats(t * p);
    double *wide = malloc(sizeof(double) * t * d);
    memset(wide, 0, sizeof(double) * t * d);
    Part parts[2] = {{{1, 2, 3}, b * 1000 + g, t * p, narrow, 0}, {{4}, ((int64_t)8 << 32) - 100, t * d, 0, wide}};
    clipwise_noise(parts, 2, 1.5, 2);
    free(narrow), free(wide);
}
#endif

int main(void) {
    const int64_t sizes[][5] = {{1, 1, 1, 1, 1},     {3, 2, 17, 5, 7},     {2, 1, 256, 7, 16},   {2, 1, 257, 16, 8},
                                {1, 2, 130, 33, 64}, {2, 1, 300, 260, 65}, {3, 1, 5, 129, 1030}, {2, 1, 0, 3, 4}};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++)
        run(sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], sizes[i][4]);
    return 0;
}
