/* What a file system can do to a process, at its k-th operation on the files of one folder.
 *
 * Preloaded (LD_PRELOAD), it stands between a process and the C library. It does nothing before
 * `faults_arm` is called, and nothing to files elsewhere.
 *
 *     cc -shared -fPIC -O1 -o faults.so faults.c -ldl -lpthread
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Kinds of operation; a mask of them says which are counted. */
enum { OPEN = 1, WRITE = 2, CUT = 4, SYNC = 8, ALLOCATE = 16, NAME = 32, READ = 64, LOOK = 128 };

/* What happens at operation k. */
enum { COUNT, KILL, HALF_AND_KILL, FAIL, FAIL_FROM, SHORT, SHORT_FROM, PAUSE, RECORD };

/* What the caller of `judge` does next. */
enum { PASS, REFUSED, HALF };

enum { FILES = 4096, KINDS = 8 };

static char folder[PATH_MAX];
static size_t folder_length;
static long at;
/* How many operations were counted, of any kind and of each; where the parent sees it, too. */
static long here[1 + KINDS], *seen = here;
static int action, number, mask, journal = -1;
static unsigned seed;
static char ours[FILES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

void faults_arm(const char *path, long first, int what, int error, int kinds, int journal_fd) {
  snprintf(folder, sizeof folder, "%s/", path);
  folder_length = strlen(folder);
  at = first;
  action = what;
  number = error;
  mask = kinds;
  journal = journal_fd;
  memset(seen, 0, sizeof here);
  seed = (unsigned)first;
}

void faults_disarm(void) { folder_length = 0; }

/* Operations of these kinds. */
long faults_seen(int kinds) {
  long sum = 0;
  for (int k = 0; k < KINDS; k++)
    if (kinds & 1 << k) sum += seen[1 + k];
  return sum;
}

void faults_share(void) {
  int shared = MAP_SHARED | MAP_ANONYMOUS;
  void *made = mmap(NULL, sizeof here, PROT_READ | PROT_WRITE, shared, -1, 0);
  if (made != MAP_FAILED) seen = made;
}

static int is_ours(const char *path) {
  char whole[2 * PATH_MAX];
  if (!folder_length || !path) return 0;
  if (path[0] != '/') {
    char here[PATH_MAX];
    if (!getcwd(here, sizeof here)) return 0;
    snprintf(whole, sizeof whole, "%s/%s", here, path);
  } else {
    snprintf(whole, sizeof whole, "%s/", path);
  }
  return strncmp(whole, folder, folder_length) == 0;
}

static int is_our_fd(int fd) { return folder_length && fd >= 0 && fd < FILES && ours[fd]; }

static int judge(int kind) {
  if (!(mask & kind)) return PASS;
  __atomic_fetch_add(&seen[1 + __builtin_ctz((unsigned)kind)], 1, __ATOMIC_SEQ_CST);
  long now = __atomic_fetch_add(seen, 1, __ATOMIC_SEQ_CST);
  if (action == PAUSE) {
    usleep(rand_r(&seed) % (unsigned)(at + 1));
    return PASS;
  }
  if (now < at || action == COUNT || action == RECORD) return PASS;
  if (action == FAIL_FROM || (action == FAIL && now == at)) {
    errno = number;
    return REFUSED;
  }
  if (action == SHORT_FROM || (action == SHORT && now == at)) return HALF;
  if (action == KILL && now == at) kill(getpid(), SIGKILL);
  if (action == HALF_AND_KILL && now == at) return HALF;
  return PASS;
}

static void after_half(void) {
  if (action == HALF_AND_KILL) kill(getpid(), SIGKILL);
}

/* The journal: kind, descriptor, offset, bytes; then the bytes. */
static void put(int kind, int fd, int64_t offset, const void *data, int64_t size) {
  if (action != RECORD || journal < 0) return;
  REAL(write);
  int64_t head[4] = {kind, fd, offset, size};
  pthread_mutex_lock(&lock);
  if (real(journal, head, sizeof head) < 0 || (size && real(journal, data, (size_t)size) < 0))
    abort();
  pthread_mutex_unlock(&lock);
}

static void put_names(int kind, const char *a, const char *b) {
  char both[2 * PATH_MAX];
  int size = snprintf(both, sizeof both, "%s%c%s", a, 0, b ? b : "");
  put(kind, -1, 0, both, size);
}

/* Opening and closing. */

static int opened(int fd, const char *path, int flags) {
  if (fd >= 0 && fd < FILES) {
    ours[fd] = 1;
    put('o', fd, flags, path, (int64_t)strlen(path));
  }
  return fd;
}

#define OPENING(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    if (!is_ours(path)) return real(path, flags, mode); \
    if (judge(OPEN) == REFUSED) return -1; \
    return opened(real(path, flags, mode), path, flags); \
  }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name) \
  int name(int at_fd, const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    if (!is_ours(path)) return real(at_fd, path, flags, mode); \
    if (judge(OPEN) == REFUSED) return -1; \
    return opened(real(at_fd, path, flags, mode), path, flags); \
  }
OPENING_AT(openat)
OPENING_AT(openat64)

int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < FILES) ours[fd] = 0;
  return real(fd);
}

/* Writing. */

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  if (!is_our_fd(fd)) return real(fd, data, size);
  int verdict = judge(WRITE);
  if (verdict == REFUSED) return -1;
  off_t offset = lseek(fd, 0, SEEK_CUR);
  ssize_t done = real(fd, data, verdict == HALF ? (size + 1) / 2 : size);
  if (verdict == HALF) after_half();
  if (done > 0) put('w', fd, offset, data, done);
  return done;
}

#define WRITING_AT(name, offset_t) \
  ssize_t name(int fd, const void *data, size_t size, offset_t offset) { \
    REAL(name); \
    if (!is_our_fd(fd)) return real(fd, data, size, offset); \
    int verdict = judge(WRITE); \
    if (verdict == REFUSED) return -1; \
    ssize_t done = real(fd, data, verdict == HALF ? (size + 1) / 2 : size, offset); \
    if (verdict == HALF) after_half(); \
    if (done > 0) put('w', fd, offset, data, done); \
    return done; \
  }
WRITING_AT(pwrite, off_t)
WRITING_AT(pwrite64, off64_t)

/* Many pieces at once: written one by one, so that half of them is half of their bytes. */
static ssize_t write_pieces(int fd, const struct iovec *pieces, int count, off_t offset) {
  int verdict = judge(WRITE);
  if (verdict == REFUSED) return -1;
  ssize_t size = 0, done = 0;
  for (int k = 0; k < count; k++) size += (ssize_t)pieces[k].iov_len;
  ssize_t wanted = verdict == HALF ? (size + 1) / 2 : size;
  static __typeof__(pwrite) *real;
  if (!real) real = (__typeof__(pwrite) *)dlsym(RTLD_NEXT, "pwrite");
  for (int k = 0; k < count && done < wanted; k++) {
    size_t part = pieces[k].iov_len;
    if ((ssize_t)part > wanted - done) part = (size_t)(wanted - done);
    ssize_t now = real(fd, pieces[k].iov_base, part, offset + done);
    if (now < 0) return done ? done : -1;
    put('w', fd, offset + done, pieces[k].iov_base, now);
    done += now;
    if ((size_t)now < part) break;
  }
  if (verdict == HALF) after_half();
  return done;
}

#define WRITING_PIECES(name, offset_t) \
  ssize_t name(int fd, const struct iovec *pieces, int count, offset_t offset) { \
    REAL(name); \
    if (!is_our_fd(fd)) return real(fd, pieces, count, offset); \
    return write_pieces(fd, pieces, count, offset); \
  }
WRITING_PIECES(pwritev, off_t)
WRITING_PIECES(pwritev64, off64_t)

#define WRITING_PIECES_2(name, offset_t) \
  ssize_t name(int fd, const struct iovec *pieces, int count, offset_t offset, int flags) { \
    REAL(name); \
    if (!is_our_fd(fd)) return real(fd, pieces, count, offset, flags); \
    return write_pieces(fd, pieces, count, offset); \
  }
WRITING_PIECES_2(pwritev2, off_t)
WRITING_PIECES_2(pwritev64v2, off64_t)

/* Length, space, and what makes durable. */

#define CUTTING(name, offset_t) \
  int name(int fd, offset_t length) { \
    REAL(name); \
    if (!is_our_fd(fd)) return real(fd, length); \
    if (judge(CUT) == REFUSED) return -1; \
    int done = real(fd, length); \
    if (!done) put('t', fd, length, NULL, 0); \
    return done; \
  }
CUTTING(ftruncate, off_t)
CUTTING(ftruncate64, off64_t)

#define ALLOCATING(name, offset_t) \
  int name(int fd, int how, offset_t start, offset_t length) { \
    REAL(name); \
    if (is_our_fd(fd) && judge(ALLOCATE) == REFUSED) return -1; \
    return real(fd, how, start, length); \
  }
ALLOCATING(fallocate, off_t)
ALLOCATING(fallocate64, off64_t)

int sync_file_range(int fd, off64_t start, off64_t length, unsigned flags) {
  REAL(sync_file_range);
  if (is_our_fd(fd) && judge(SYNC) == REFUSED) return -1;
  return real(fd, start, length, flags);
}

#define SYNCING(name) \
  int name(int fd) { \
    REAL(name); \
    if (!is_our_fd(fd)) return real(fd); \
    if (judge(SYNC) == REFUSED) return -1; \
    int done = action == RECORD ? 0 : real(fd); \
    if (!done) put('s', fd, 0, NULL, 0); \
    return done; \
  }
SYNCING(fsync)
SYNCING(fdatasync)

/* Names. */

#define RENAMING(old, new, ...) \
  if (!is_ours(old) && !is_ours(new)) return real(__VA_ARGS__); \
  if (judge(NAME) == REFUSED) return -1; \
  int done = real(__VA_ARGS__); \
  if (!done) put_names('r', old, new); \
  return done;

int rename(const char *old, const char *new) { REAL(rename); RENAMING(old, new, old, new) }
int renameat(int a, const char *old, int b, const char *new) {
  REAL(renameat);
  RENAMING(old, new, a, old, b, new)
}
int renameat2(int a, const char *old, int b, const char *new, unsigned flags) {
  REAL(renameat2);
  RENAMING(old, new, a, old, b, new, flags)
}

#define REMOVING(path, ...) \
  if (!is_ours(path)) return real(__VA_ARGS__); \
  if (judge(NAME) == REFUSED) return -1; \
  int done = real(__VA_ARGS__); \
  if (!done) put_names('u', path, NULL); \
  return done;

int unlink(const char *path) { REAL(unlink); REMOVING(path, path) }
int unlinkat(int fd, const char *path, int flags) { REAL(unlinkat); REMOVING(path, fd, path, flags) }

/* Reading. */

ssize_t read(int fd, void *data, size_t size) {
  REAL(read);
  if (!is_our_fd(fd)) return real(fd, data, size);
  int verdict = judge(READ);
  if (verdict == REFUSED) return -1;
  return real(fd, data, verdict == HALF && size > 1 ? size / 2 : size);
}

#define READING_AT(name, offset_t) \
  ssize_t name(int fd, void *data, size_t size, offset_t offset) { \
    REAL(name); \
    if (!is_our_fd(fd)) return real(fd, data, size, offset); \
    int verdict = judge(READ); \
    if (verdict == REFUSED) return -1; \
    return real(fd, data, verdict == HALF && size > 1 ? size / 2 : size, offset); \
  }
READING_AT(pread, off_t)
READING_AT(pread64, off64_t)

/* Python gives one piece at a time. */
#define READING_PIECES(name, offset_t) \
  ssize_t name(int fd, const struct iovec *pieces, int count, offset_t offset) { \
    REAL(name); \
    if (!is_our_fd(fd)) return real(fd, pieces, count, offset); \
    int verdict = judge(READ); \
    if (verdict == REFUSED) return -1; \
    if (verdict != HALF || count != 1 || pieces[0].iov_len < 2) \
      return real(fd, pieces, count, offset); \
    struct iovec half = {pieces[0].iov_base, pieces[0].iov_len / 2}; \
    return real(fd, &half, 1, offset); \
  }
READING_PIECES(preadv, off_t)
READING_PIECES(preadv64, off64_t)

/* Looking and locking. */

int flock(int fd, int how) {
  REAL(flock);
  return is_our_fd(fd) && judge(LOOK) == REFUSED ? -1 : real(fd, how);
}

#define LOOKING(name, stat_t) \
  int name(const char *path, stat_t *found) { \
    REAL(name); \
    return is_ours(path) && judge(LOOK) == REFUSED ? -1 : real(path, found); \
  }
LOOKING(stat, struct stat)
LOOKING(stat64, struct stat64)
LOOKING(lstat, struct stat)
LOOKING(lstat64, struct stat64)

#define LOOKING_FD(name, stat_t) \
  int name(int fd, stat_t *found) { \
    REAL(name); \
    return is_our_fd(fd) && judge(LOOK) == REFUSED ? -1 : real(fd, found); \
  }
LOOKING_FD(fstat, struct stat)
LOOKING_FD(fstat64, struct stat64)

#define LOOKING_AT(name, stat_t) \
  int name(int fd, const char *path, stat_t *found, int flags) { \
    REAL(name); \
    int known = path[0] ? is_ours(path) : is_our_fd(fd); \
    return known && judge(LOOK) == REFUSED ? -1 : real(fd, path, found, flags); \
  }
LOOKING_AT(fstatat, struct stat)
LOOKING_AT(fstatat64, struct stat64)
