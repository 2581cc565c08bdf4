#!/bin/busybox sh
# First program of the guest, in the initramfs: finds the host's file system and makes it the root,
# below an overlay in memory. Everything here is in busybox; nothing else is at hand yet.
b=/bin/busybox
# An error ends the first process, and with it the machine: the kernel is told panic=-1.
set -e
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
while read -r module; do $b insmod "$module"; done < /modules

transport=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o ro,cache=loose,$transport root /lower
$b mount -t tmpfs upper /upper
$b mkdir /upper/changes /upper/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/changes,workdir=/upper/work root /root

$b mount --move /proc /root/proc
$b mount --move /dev /root/dev
$b mount -t sysfs sys /root/sys
$b mount -t tmpfs run /root/run
$b mkdir -p /root/dev/pts /root/dev/shm /root/run/vm /root/lib/modules
$b mount -t devpts pts /root/dev/pts
$b mount -t tmpfs shm /root/dev/shm
$b ln -s /proc/self/fd /root/dev/fd

$b mount -t 9p -o cache=none,$transport share /root/run/vm
. /root/run/vm/settings
$b mount --bind "/lower$MODULES" /root/lib/modules
if [ -n "$WRITABLE" ]; then
    $b mkdir -p "/root$WRITABLE"
    $b mount -t 9p -o cache=none,$transport writable "/root$WRITABLE"
fi
exec $b switch_root /root /bin/busybox sh /run/vm/main
