/* A plugin with pyxis's main option. Like pyxis it makes a directory when slurmd starts, and fails without it. */
#include <slurm/spank.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

SPANK_PLUGIN(shoal_example, 1)

static char image[256];

static int keep_image(int value, const char *argument, int remote) {
    strncpy(image, argument, sizeof image - 1);
    return 0;
}

static struct spank_option option = {"container-image", "IMAGE", "the image of a job", 1, 0, keep_image};

int slurm_spank_init(spank_t spank, int count, char **arguments) {
    if (spank_context() != S_CTX_SLURMD)
        return spank_option_register(spank, &option);
    mkdir("/run/shoal-example", 0755);
    return 0;
}

int slurm_spank_user_init(spank_t spank, int count, char **arguments) {
    if (image[0] == 0)
        return 0;
    if (access("/run/shoal-example", X_OK) != 0)
        return -1;
    spank_setenv(spank, "EXAMPLE_SCOPE", count > 0 ? arguments[0] : "none", 1);
    return spank_setenv(spank, "EXAMPLE_IMAGE", image, 1) == ESPANK_SUCCESS ? 0 : -1;
}
