/* Sums the ranks of all processes, and says whether the sum is right. */
#include <mpi.h>
#include <stdio.h>

int main(int argc, char **argv) {
    int rank, size, sum = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    int expected = size * (size - 1) / 2;
    printf("all_reduce rank %d of %d: %d, %s\n", rank, size, sum, sum == expected ? "right" : "WRONG");
    MPI_Finalize();
    return sum != expected;
}
