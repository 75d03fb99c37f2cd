/* Preloaded into nginx for the benchmark: makes renamed files durable, as boxd does, because nginx has no setting for it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int sync_path(const char *path, int flags) {
    int fd = open(path, flags | O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int failed = fsync(fd);
    close(fd);
    return failed;
}

int rename(const char *from, const char *to) {
    static int (*original)(const char *, const char *);
    if (!original)
        original = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    char directory[PATH_MAX];
    if (strlen(to) >= sizeof directory || sync_path(from, 0) || original(from, to))
        return -1;
    strcpy(directory, to);
    return sync_path(dirname(directory), O_DIRECTORY);
}
