# First program of a node, in namespaces of its own: gives the node its file systems and then waits, as the
# parent of every process that loses its own. It expects in the environment: NODE (name), FOLDER (the node's
# folder), SHARED (folders of this machine to read, one a line) and HIERARCHIES (of cgroups, one a line).
set -eu
# /proc is still the machine's, so this is the number by which the machine knows the process.
read -r pid rest < /proc/self/stat
mount --make-rprivate /

# The machine's files, below an overlay: nothing that runs on the node can change them.
root=$FOLDER/root
mount -t overlay -o "lowerdir=/,upperdir=$FOLDER/changes,workdir=$FOLDER/work" node "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
echo "$SHARED" | while read -r folder; do
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
    mount -o remount,bind,ro "$root$folder"
done
mount --bind "$FOLDER" "$root$FOLDER"
# Their own file systems cannot be an overlay, because containers' are.
for folder in kubelet containerd; do
    mkdir -p "$root/var/lib/$folder"
    mount --bind "$FOLDER/$folder" "$root/var/lib/$folder"
done
mkdir -p "$root/run/netns" "$root/run/lock" "$root/old"
cd "$root"
pivot_root . old
umount -l /old

# Each hierarchy of cgroups begins at the node's own part.
mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
echo "$HIERARCHIES" | while read -r hierarchy; do
    folder=/sys/fs/cgroup/${hierarchy#name=}
    mkdir "$folder"
    case $hierarchy in name=*) hierarchy=none,$hierarchy ;; esac
    mount -t cgroup -o "$hierarchy" cgroup "$folder"
done
# The kubelet writes settings that belong to the whole machine. It finds its values there already, in files.
mkdir -p /run/settings
setting() {
    [ -e "/proc/sys/$1" ] || return 0
    file=/run/settings/$(echo "$1" | tr / .)
    echo "$2" > "$file"
    mount --bind "$file" "/proc/sys/$1"
}
setting vm/overcommit_memory 1
setting vm/panic_on_oom 0
setting kernel/panic 10
setting kernel/panic_on_oops 1
setting kernel/keys/root_maxkeys 1000000
setting kernel/keys/root_maxbytes 25000000
# A pod's volume may pass its mounts on to the node, and the node's to pods.
mount --make-rshared /
echo "$NODE" > /proc/sys/kernel/hostname

echo "$pid" > "$FOLDER/init.new"
mv "$FOLDER/init.new" "$FOLDER/init"
trap 'exit 0' TERM
while :; do
    sleep 3600 &
    wait $!
done
