/* A SPANK plugin with options, as a site's would be; tasks see the first one's value as SITE_IMAGE, and all
   that were given, with their values, as SITE_GIVEN. Only srun has the last one. Slurm's header needs a package of its own; of its
   contents (spank.h) only what follows is needed. VERSION: Slurm's, as in SLURM_VERSION_NUMBER. */

#include <stddef.h>
#include <stdio.h>
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

static char given[4][64]; /* copied: Slurm 24.11 gives its own back before the batch script begins */

static int on_given(int val, const char *value, int remote)
{
	(void)remote;
	snprintf(given[val], sizeof given[val], "%s", value ? value : "yes");
	return 0;
}

int slurm_spank_task_init(void *spank, int count, char **words)
{
	(void)count, (void)words;
	char all[sizeof given + 4];
	snprintf(all, sizeof all, "%s,%s,%s,%s", given[0], given[1], given[2], given[3]);
	spank_setenv(spank, "SITE_GIVEN", all, 1);
	return given[0][0] ? spank_setenv(spank, "SITE_IMAGE", given[0], 1) : 0;
}

static struct spank_option options[] = {
	{"site-image", "NAME", "image of the job", 1, 0, on_given},
	{"site-quiet", NULL, "takes no value", 0, 1, on_given},
	{"site-level", "N", "may lack its value, which --help does not say", 2, 2, on_given},
	{"site-resume", "0|1", "of steps", 1, 3, on_given},
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
