"""C code of radial splines: weights of pairs, read from a table of B-spline coefficients, and all derivatives.

A table has `n_intervals` equal intervals between 0 and 1 and `n_intervals + DEGREE` rows; a length in interval i reads the rows
i to i + DEGREE. Where pairs are of several kinds, the table has as many rows for each of them. Everything beyond 1 is
zero. Tables, lengths and sums are double; weights and their gradients are `real`.
Columns are processed in blocks that stay in the cache. A pair, or for sums over pairs a column, belongs to one thread, so that
results do not depend on the number of threads.
"""

from __future__ import annotations

DEGREE = 5
PIECES = (
    (1, -5, 10, -10, 5, -1),
    (26, -50, 20, 20, -20, 5),
    (66, 0, -60, 0, 30, -10),
    (26, 50, 20, -20, -20, 10),
    (1, 5, 10, 10, 5, -5),
    (0, 0, 0, 0, 0, 1),
)
"""120 times the coefficients, lowest power first, of what each of the six B-splines of an interval is there."""
SCALE = 120
COLUMNS = 128
"""Columns of a block."""
PAIRS = 256
"""Pairs of a block."""


def splines_source(real: str) -> str:
    """C code of all passes. real: `float` or `double`."""
    return "\n".join([f"typedef {real} real;", _HEAD, *(_place(order) for order in range(3)), _PASSES]) + "\n"


def _place(order: int) -> str:
    """A function that writes the values, or derivatives of this order, of the B-splines at x; it returns the first row, or -1
    where all are zero."""
    lines = [
        f"static inline int64_t place{order}(double x, int64_t n, double *b) {{",
        "if (x >= 1) return -1;",
        "const double position = x > 0 ? x * n : x == x ? 0 : x;",
        "int64_t at = position == position ? (int64_t)position : 0;",
        "if (at > n - 1) at = n - 1;",
        "const double u = position - at;",
    ]
    for number, piece in enumerate(PIECES):
        coefficients = [float(value) for value in piece]
        for _ in range(order):
            coefficients = [power * value for power, value in enumerate(coefficients)][1:]
        polynomial = "0.0"
        for value in reversed(coefficients):
            polynomial = f"({polynomial} * u + {value!r})"
        factor = " * n" * order
        lines.append(f"b[{number}] = {polynomial} * {1 / SCALE!r}{factor};")
    return "\n".join([*lines, "return at;", "}"])


_HEAD = f"""
#include <stdint.h>
#include <string.h>
#define COLUMNS {COLUMNS}
#define PAIRS {PAIRS}
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define READ(c) (b[0] * c0[c] + b[1] * c1[c] + b[2] * c2[c] + b[3] * c3[c] + b[4] * c4[c] + b[5] * c5[c])
#define ROW (at + (kinds ? kinds[pair] * (n + 5) : 0))
#define ROWS(table) \\
    const double *restrict c0 = (table) + ROW * columns, *restrict c1 = c0 + columns, *restrict c2 = c1 + columns, \\
        *restrict c3 = c2 + columns, *restrict c4 = c3 + columns, *restrict c5 = c4 + columns;
"""

_PASSES = """
#define RESULTS(NAME, PLACE, FACTOR) \\
void NAME(const double *restrict x, const double *restrict a, const double *restrict table, \\
          const int64_t *restrict kinds, int64_t n_pairs, int64_t n, int64_t n_rows, int64_t columns, real *restrict out, \\
          int threads) { \\
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic, 1)") \\
    for (int64_t first = 0; first < n_pairs; first += PAIRS) { \\
        const int64_t last = MIN(first + PAIRS, n_pairs); \\
        for (int64_t begin = 0; begin < columns; begin += COLUMNS) { \\
            const int64_t end = MIN(begin + COLUMNS, columns); \\
            for (int64_t pair = first; pair < last; pair++) { \\
                double b[6]; \\
                const int64_t at = PLACE(x[pair], n, b); \\
                real *restrict o = out + pair * columns; \\
                if (at < 0) { memset(o + begin, 0, (end - begin) * sizeof(real)); continue; } \\
                for (int k = 0; k < 6; k++) b[k] *= FACTOR; \\
                ROWS(table) \\
                _Pragma("omp simd") \\
                for (int64_t c = begin; c < end; c++) o[c] = (real)READ(c); \\
            } \\
        } \\
    } \\
}
RESULTS(values, place0, 1.0)
RESULTS(slopes, place1, a[pair])

#define DOTS(NAME, PLACE) \\
void NAME(const double *restrict x, const real *restrict all_g, const double *restrict table, \\
          const int64_t *restrict kinds, int64_t n_pairs, int64_t n, int64_t n_rows, int64_t columns, double *restrict out, \\
          int threads) { \\
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic, 1)") \\
    for (int64_t first = 0; first < n_pairs; first += PAIRS) { \\
        const int64_t last = MIN(first + PAIRS, n_pairs); \\
        memset(out + first, 0, (last - first) * sizeof(double)); \\
        for (int64_t begin = 0; begin < columns; begin += COLUMNS) { \\
            const int64_t end = MIN(begin + COLUMNS, columns); \\
            for (int64_t pair = first; pair < last; pair++) { \\
                double b[6]; \\
                const int64_t at = PLACE(x[pair], n, b); \\
                if (at < 0) continue; \\
                const real *restrict g = all_g + pair * columns; \\
                ROWS(table) \\
                double sum = 0; \\
                _Pragma("omp simd reduction(+: sum)") \\
                for (int64_t c = begin; c < end; c++) sum += g[c] * READ(c); \\
                out[pair] += sum; \\
            } \\
        } \\
    } \\
}
DOTS(first_dots, place1)
DOTS(second_dots, place2)

#define SUMS(NAME, PLACE, FACTOR) \\
void NAME(const double *restrict x, const double *restrict a, const real *restrict all_g, \\
          const int64_t *restrict kinds, int64_t n_pairs, int64_t n, int64_t n_rows, int64_t columns, double *restrict out, \\
          int threads) { \\
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic, 1)") \\
    for (int64_t begin = 0; begin < columns; begin += COLUMNS) { \\
        const int64_t end = MIN(begin + COLUMNS, columns); \\
        for (int64_t row = 0; row < n_rows; row++) memset(out + row * columns + begin, 0, (end - begin) * sizeof(double)); \\
        for (int64_t pair = 0; pair < n_pairs; pair++) { \\
            double b[6]; \\
            const int64_t at = PLACE(x[pair], n, b); \\
            if (at < 0) continue; \\
            for (int k = 0; k < 6; k++) b[k] *= FACTOR; \\
            const real *restrict g = all_g + pair * columns; \\
            double *restrict o = out + ROW * columns; \\
            _Pragma("omp simd") \\
            for (int64_t c = begin; c < end; c++) { \\
                const double value = g[c]; \\
                o[c] += b[0] * value; \\
                o[c + columns] += b[1] * value; \\
                o[c + 2 * columns] += b[2] * value; \\
                o[c + 3 * columns] += b[3] * value; \\
                o[c + 4 * columns] += b[4] * value; \\
                o[c + 5 * columns] += b[5] * value; \\
            } \\
        } \\
    } \\
}
SUMS(value_sums, place0, 1.0)
SUMS(slope_sums, place1, a[pair])

/* Rows of the solution of L U y = x in place of x. lower, upper: (n_rows, band) and (n_rows, band + 1). */
void solve(const double *restrict lower, const double *restrict upper, int64_t n_rows, int64_t band, int64_t columns,
           double *restrict x, int threads) {
    #pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t begin = 0; begin < columns; begin += COLUMNS) {
        const int64_t end = MIN(begin + COLUMNS, columns);
        for (int64_t i = 1; i < n_rows; i++)
            for (int64_t j = i > band ? i - band : 0; j < i; j++) {
                const double factor = lower[i * band + j - i + band];
                if (factor == 0) continue;
                #pragma omp simd
                for (int64_t c = begin; c < end; c++) x[i * columns + c] -= factor * x[j * columns + c];
            }
        for (int64_t i = n_rows - 1; i >= 0; i--) {
            for (int64_t j = i + 1; j < MIN(i + band + 1, n_rows); j++) {
                const double factor = upper[i * (band + 1) + j - i];
                if (factor == 0) continue;
                #pragma omp simd
                for (int64_t c = begin; c < end; c++) x[i * columns + c] -= factor * x[j * columns + c];
            }
            const double inverse = 1 / upper[i * (band + 1)];
            #pragma omp simd
            for (int64_t c = begin; c < end; c++) x[i * columns + c] *= inverse;
        }
    }
}
"""
