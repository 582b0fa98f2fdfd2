#!/bin/bash
# Run a command on the login host of a SLURM cluster that exists on this machine only as long as the command runs.
#
#   sudo tools/slurm_cluster.sh .venv/bin/python -m rl.train --config tiny --launch.hosts slurm
#
# Needs root and Debian's packages slurm-wlm, munge and iproute2. The cluster has NODES nodes (2). Each is a slurmd in
# namespaces of its own: hostname, network address, processes, /tmp and /dev/shm are not those of the login host. All
# share the file system and this machine's cores, and are joined by a bridge that leads nowhere else. The kernel ends
# every process of the cluster with this script; the daemons' logs are shown if the cluster does not come up.
set -euo pipefail

if [[ ${CLUSTER_STAGE-} = "" ]]; then
    CLUSTER_STAGE=login exec unshare --net --uts --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi

if [[ $CLUSTER_STAGE = node ]]; then
    hostname "$1"
    mount -t tmpfs tmpfs /tmp
    mount -t tmpfs tmpfs /dev/shm
    exec slurmd -D -N "$1" 2> /dev/null  # the log has the same
fi

nodes=${NODES:-2}
export SLURM_CONF=/run/slurm.conf
hostname login
mount -t tmpfs tmpfs /run  # state of the daemons, of munge and of ip netns
ip link set lo up
ip link add cluster type bridge
ip address add 10.77.0.100/24 dev cluster
ip link set cluster up
{
    echo 127.0.0.1 localhost
    echo 10.77.0.100 login
    for ((i = 1; i <= nodes; i++)); do echo "10.77.0.$i node$i"; done
} > /run/hosts
mount --bind /run/hosts /etc/hosts

cat > $SLURM_CONF << END
ClusterName=relay
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
NodeName=node[1-$nodes] CPUs=$(nproc)
PartitionName=all Nodes=ALL Default=YES
END
echo CgroupPlugin=cgroup/v1 > /run/cgroup.conf  # nothing is in a cgroup; Debian 12 has no "disabled"
head -c 1024 /dev/urandom > /run/munge.key
chmod 600 /run/munge.key
munged --force --key-file=/run/munge.key --socket=/run/munge.socket --pid-file=/run/munge.pid \
    --log-file=/run/munge.log --seed-file=/run/munge.seed
mkdir /run/slurmctld
slurmctld
for ((i = 1; i <= nodes; i++)); do
    mkdir "/run/slurmd-node$i"
    ip netns add "node$i"
    ip link add "link$i" master cluster up type veth peer name eth0 netns "node$i"
    ip -n "node$i" link set lo up
    ip -n "node$i" address add "10.77.0.$i/24" dev eth0
    ip -n "node$i" link set eth0 up
    CLUSTER_STAGE=node ip netns exec "node$i" unshare --uts --mount --pid --fork --kill-child --mount-proc \
        "$0" "node$i" &
done

for ((tries = 0; ; tries++)); do
    [[ $(sinfo --noheader --Node --states=idle 2> /dev/null | wc -l) = "$nodes" ]] && break
    if ((tries == 60)); then
        tail -n 20 /run/*.log >&2
        exit 1
    fi
    sleep 0.5
done
unset CLUSTER_STAGE
"$@"
