/* A SPANK plugin with options, as a site's would be; tasks see the first one's value as SITE_IMAGE. Only srun
   has the last one. Slurm's header needs a package of its own; of its
   contents (spank.h) only what follows is needed. VERSION: Slurm's, as in SLURM_VERSION_NUMBER. */

#include <stddef.h>
#include <string.h>

struct spank_option {
	const char *name, *arginfo, *usage;
	int has_arg, val;
	int (*on_given)(int val, const char *value, int remote);
};

extern int spank_context(void);
enum { CONTEXT_LOCAL = 1, CONTEXT_REMOTE }; /* srun, and its tasks */

extern int spank_option_register(void *spank, struct spank_option *option);
extern int spank_setenv(void *spank, const char *name, const char *value, int overwrite);

const char plugin_name[] = "site_options";
const char plugin_type[] = "spank";
const unsigned int plugin_version = VERSION;
const unsigned int spank_plugin_version = 1;

static char *image;

static int on_image(int val, const char *value, int remote)
{
	(void)val, (void)remote;
	image = strdup(value); /* Slurm 24.11 gives its own back before the batch script begins */
	return image == NULL;
}

int slurm_spank_task_init(void *spank, int count, char **words)
{
	(void)count, (void)words;
	return image == NULL ? 0 : spank_setenv(spank, "SITE_IMAGE", image, 1);
}

static struct spank_option options[] = {
	{"site-image", "NAME", "image of the job", 1, 0, on_image},
	{"site-quiet", NULL, "takes no value", 0, 0, NULL},
	{"site-level", "N", "may lack its value, which --help does not say", 2, 0, NULL},
	{"site-resume", "0|1", "of steps", 1, 0, NULL},
};

/* sbatch knows only options that are registered here; srun would also read a table `spank_options`. */
int slurm_spank_init(void *spank, int count, char **words)
{
	(void)count, (void)words;
	spank_option_register(spank, &options[0]);
	spank_option_register(spank, &options[1]);
	spank_option_register(spank, &options[2]);
	int context = spank_context();
	if (context == CONTEXT_LOCAL || context == CONTEXT_REMOTE)
		spank_option_register(spank, &options[3]);
	return 0;
}
