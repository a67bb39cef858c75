/* The triad of the STREAM benchmark (McCalpin 1995): a = b + s c on three arrays of doubles.

   stream <MiB per array> <rounds>
   prints, per round, the bandwidth in GB/s, counted as STREAM does: 3 arrays of 8 bytes per element.
   The threads come from OMP_NUM_THREADS. */
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv) {
    long mebibytes = argc > 1 ? atol(argv[1]) : 64;
    long rounds = argc > 2 ? atol(argv[2]) : 10;
    size_t n = mebibytes > 0 ? (size_t)mebibytes * 1024 * 1024 / sizeof(double) : 0;
    double *restrict a = malloc(n * sizeof *a);
    double *restrict b = malloc(n * sizeof *b);
    double *restrict c = malloc(n * sizeof *c);
    if (n == 0 || !a || !b || !c) {
        fprintf(stderr, "stream: cannot have 3 arrays of %ld MiB\n", mebibytes);
        return 1;
    }

    /* Each thread touches first what it will use: pages land on its own memory node. */
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        a[i] = 0.0;
        b[i] = 2.0;
        c[i] = 1.0;
    }

    for (long round = 0; round < rounds; round++) {
        double start = seconds();
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < n; i++) a[i] = b[i] + 3.0 * c[i];
        double passed = seconds() - start;
        printf("%.4f\n", 3.0 * 8.0 * (double)n / passed / 1e9);
    }

    /* Reading the result keeps the compiler from leaving the loop out. */
    for (size_t i = 0; i < n; i += n / 7 + 1)
        if (a[i] != 5.0) {
            fprintf(stderr, "stream: a[%zu] = %g, not 5\n", i, a[i]);
            return 1;
        }
    return 0;
}
