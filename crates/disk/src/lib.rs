//! Guest disks: an NBD server that writes through and mirrors, and the backup's mirror
