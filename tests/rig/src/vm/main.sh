# What init becomes: runs the command, keeps its exit code for the host, and turns the machine off.
. /run/vm/settings
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
busybox ip link set lo up
busybox hostname kplane-vm
ulimit -n 65536
# What qemu is told gives the guest what the host's namespace reaches, and nobody the guest.
if [ -n "$NETWORK" ]; then
    modprobe virtio_net
    busybox ip link set eth0 up
    busybox ip addr add 10.0.2.15/24 dev eth0
    busybox ip route add default via 10.0.2.2
fi

case $MODE in
run)
    for port in /sys/class/virtio-ports/*; do
        read -r name < "$port/name"
        case $name in
        out) out=/dev/${port##*/} ;;
        err) err=/dev/${port##*/} ;;
        esac
    done
    sh /run/vm/command < /dev/null > "$out" 2> "$err"
    echo $? > /run/vm/exit
    ;;
shell)
    busybox setsid busybox cttyhack sh /run/vm/command < /dev/hvc0 > /dev/hvc0 2>&1
    echo $? > /run/vm/exit
    ;;
esac
busybox poweroff -f
